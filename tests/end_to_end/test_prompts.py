"""GRPO on prompts in a Parquet file, scored by a reward function of the user."""

import pyarrow as pa
import pyarrow.parquet as pq

from tests.end_to_end.launch import TINY, metrics

OF_TASKS = ("data.num_documents", "data.num_demonstrations", "data.task", "data.sequence_length")


def test_prompts_of_a_parquet_file_train_with_a_reward_of_the_user(tmp_path, forks):
    rows = [{"prompt": f"{n}+1=", "answer": str(n + 1), "extra_info": {"index": n}} for n in range(60)]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "sums.parquet", row_group_size=16)
    (tmp_path / "mine.py").write_text(
        "def short(prompt, completion, completion_ids, truncated, answer, extra_info, **fields):\n"
        "    assert int(answer) == extra_info['index'] + 1\n"
        "    return 1.0 / (1 + len(completion_ids))\n"
    )
    done = forks.run_ranks(
        tmp_path, "train", *(key for key in TINY if not key.startswith(OF_TASKS)), "algorithm=grpo",
        "algorithm.prompts_per_step=4", "algorithm.samples_per_prompt=2", "data.path=sums.parquet",
        "data.streaming=true", "data.shuffle_block=16", "reward.functions=[{path: mine.py, name: short}]", ranks=2,
    )  # fmt: skip
    assert [rank.status for rank in done] == [0, 0], done
    rewards = [line["reward"] for line in metrics(tmp_path / "out") if line["kind"] == "train"]
    assert len(rewards) == 3 and all(0 < reward <= 0.5 for reward in rewards)
    assert "data.source=prompts" in done[0].err
