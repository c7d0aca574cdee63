"""The golden target and drafter as one checkpoint directory, with a tokenizer of its 256 ids."""

from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from tests.golden.files import DATA

TARGET, DRAFTER = DATA / "mimo-tiny", DATA / "mimo-tiny-dflash"
END_ID = 255
TEMPLATE = (
    "{% for m in messages %}{{ m.role }}:{{ m.content + '' }}\n{% endfor %}"
    "{{ mood or '' }}{{ tools | length if tools else '' }}>"
)


def byte_tokenizer() -> Tokenizer:
    """One id per byte; byte 255, which is in no text, makes room for the special token <|end|>."""
    chars = [char for char in sorted(pre_tokenizers.ByteLevel.alphabet()) if char != "ÿ"]
    bpe = Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(chars)}, merges=[]))
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    bpe.decoder = decoders.ByteLevel()
    bpe.add_special_tokens([AddedToken("<|end|>", special=True)])
    return bpe


def make_text_checkpoint(directory: Path, with_drafter: bool = True) -> Path:
    """Links the golden files into directory and adds tokenizer and chat template."""
    directory.mkdir(parents=True)
    for file in TARGET.iterdir():
        (directory / file.name).symlink_to(file.resolve())
    if with_drafter:
        (directory / "dflash").symlink_to(DRAFTER.resolve())
    byte_tokenizer().save(str(directory / "tokenizer.json"))
    (directory / "chat_template.jinja").write_text(TEMPLATE)
    return directory
