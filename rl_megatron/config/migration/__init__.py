"""The keys of other libraries, as tables, and the translation of their files into an experiment."""
