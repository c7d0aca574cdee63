"""Stages of generated Python functions: each adds a sentence of docstring and lines of code.

A stage reads the variable that the stage before it made, and leaves a variable of a stated kind
("records", "numbers", "strings", "mapping", "number" or "string"). Chaining stages whose kinds fit
gives functions with real variety: the docstring says what each line must do, and the stage how
it names its temporaries.
"""

from collections.abc import Callable

from mimo_jax.train.corpora import code_stages_lists as lists
from mimo_jax.train.corpora import code_stages_texts as texts
from mimo_jax.train.corpora.code_draft import Draft

Stage = Callable[[Draft], None]

# Stages by the kind that they read; a stage listed twice is drawn twice as often.
STAGES: dict[str, tuple[Stage, ...]] = {
    "records": (
        lists.records_filter,
        lists.records_filter,
        lists.records_sort,
        lists.records_update,
        lists.records_to_numbers,
        lists.records_to_numbers,
        lists.records_to_strings,
        lists.records_to_mapping,
        lists.records_to_mapping,
    ),
    "numbers": (
        lists.numbers_filter,
        lists.numbers_map,
        lists.numbers_map,
        lists.numbers_to_number,
        lists.numbers_to_number,
        lists.numbers_to_mapping,
    ),
    "strings": (
        texts.strings_clean,
        texts.strings_clean,
        texts.strings_number,
        texts.strings_to_mapping,
        texts.strings_to_numbers,
        texts.strings_to_string,
    ),
    "mapping": (
        texts.mapping_change,
        texts.mapping_to_strings,
        texts.mapping_to_number,
        texts.mapping_to_string,
    ),
    "number": (texts.number_change, texts.number_change, texts.number_to_string),
    "string": (texts.string_change,),
}
