"""What `make worker` runs unless EOS_APP names another: words come, loud words go."""

from eos import App, Record

app = App("hello")


@app.process("words", to="loud-words")
def louder(record: Record) -> bytes | None:
    return record.value.upper() if record.value is not None else None
