"""The pages for users of NeMo RL, verl and TRL have what docs/generate_coming_from.py writes."""

import pytest

from docs.generate_coming_from import FILES, PAGES, page


@pytest.mark.parametrize("name", FILES)
def test_the_page_is_up_to_date(name):
    assert (PAGES / f"{name}.md").read_text() == page(name), "run `python docs/generate_coming_from.py`"


@pytest.mark.parametrize("name", FILES)
def test_everything_in_the_file_is_recognised(name):
    assert "Not recognised" not in page(name)
