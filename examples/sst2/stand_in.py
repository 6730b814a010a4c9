"""What stands in for SST-2 and DistilBERT where these are not at hand: made from Python's standard library.

The task: is a line prose or code? The text of a comment, without its mark, has the label 1, and a line of
code the label 0. Training and validation have no file and no line in common.
"""

import io
import sysconfig
import tokenize
from pathlib import Path

import tokenizers
import transformers
from tokenizers import models, normalizers, pre_tokenizers, processors, trainers

TEXTS = {"train": 6000, "dev": 500}
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]


def lines_of(file: Path) -> list[tuple[str, int]]:
    """Return the lines of a Python file that are a comment or simple code, each with its label."""
    found = []
    source = file.read_text(encoding="utf-8", errors="replace")
    try:
        tokens = list(tokenize.generate_tokens(io.StringIO(source).readline))
    except (SyntaxError, tokenize.TokenError):
        return []
    has_text = {token.start[0] for token in tokens if token.type in (tokenize.COMMENT, tokenize.STRING)}
    for token in tokens:
        if token.type == tokenize.COMMENT:
            found.append((token.string.strip("#:!- "), 1))
        elif token.type == tokenize.NEWLINE and token.start[0] not in has_text:
            found.append((token.line.strip(), 0))
    return [(" ".join(text.split()), label) for text, label in found if 20 <= len(text) <= 120]


def make_data(folder: Path) -> None:
    """Write train.tsv and dev.tsv, as SST-2 has them: a line of names, then a sentence and a label a line."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    seen: set[str] = set()
    for name, chosen in (("dev", files[::6]), ("train", [file for i, file in enumerate(files) if i % 6])):
        rows = {text: label for file in chosen for text, label in lines_of(file) if text not in seen}
        seen |= rows.keys()
        lines = ["sentence\tlabel"]
        for kind in (0, 1):
            texts = [text for text, label in rows.items() if label == kind]
            step = max(1, 2 * len(texts) // TEXTS[name])
            lines += [f"{text}\t{kind}" for text in texts[::step][: TEXTS[name] // 2]]
        (folder / f"{name}.tsv").write_text("\n".join(lines) + "\n", encoding="utf-8")


def make_model(folder: Path, sentences: list[str]) -> None:
    """Write the configuration of a small DistilBERT, and a tokenizer with words of these sentences."""
    tokenizer = tokenizers.Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    trainer = trainers.WordPieceTrainer(vocab_size=4000, special_tokens=SPECIAL, show_progress=False)
    tokenizer.train_from_iterator(sentences, trainer)
    around = [(token, tokenizer.token_to_id(token)) for token in ("[CLS]", "[SEP]")]
    tokenizer.post_processor = processors.TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=around)
    names = {f"{name}_token": f"[{name.upper()}]" for name in ("pad", "unk", "cls", "sep", "mask")}
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names).save_pretrained(folder)
    transformers.DistilBertConfig(
        vocab_size=tokenizer.get_vocab_size(), dim=128, hidden_dim=512, n_layers=2, n_heads=4
    ).save_pretrained(folder)
