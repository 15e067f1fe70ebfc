"""The send queue: a held frame holds all later frames, in order, and no earlier one."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from eos.shim.send_queue import HeldFrame, SendQueue


class Out:
    def __init__(self) -> None:
        self.bytes = b""
        self.lane = SendQueue(self._write)

    def _write(self, pieces: list[bytes]) -> None:
        self.bytes += b"".join(pieces)


def test_held_frame_does_not_delay_earlier_frames() -> None:
    out = Out()
    held = HeldFrame(b"held")
    out.lane.send([b"before", held, b"after"])
    out.lane.send([b"later"])
    assert out.bytes == b"before"
    assert out.lane.is_blocked
    held.release()
    assert out.bytes == b"beforeheldafterlater"
    assert not out.lane.is_blocked


def test_frame_released_early_is_sent_in_order() -> None:
    out = Out()
    first, second = HeldFrame(b"1"), HeldFrame(b"2")
    out.lane.send([first, second, b"3"])
    second.release()
    assert out.bytes == b""
    first.release()
    assert out.bytes == b"123"


def test_on_turn_callback_may_clear_the_queue() -> None:
    out = Out()
    first, second = HeldFrame(b"1"), HeldFrame(b"2")
    turns = list[str]()
    second.on_turn = lambda: (turns.append(out.bytes.decode()), out.lane.clear())[0]  # type: ignore[func-returns-value]
    out.lane.send([b"0", first, second, b"3"])
    assert turns == []
    first.release()
    assert turns == ["01"]
    second.release()
    assert out.bytes == b"01"


@given(st.lists(st.tuples(st.binary(min_size=1, max_size=3), st.booleans()), max_size=20), st.randoms())
def test_release_order_does_not_change_the_stream(frames: list[tuple[bytes, bool]], chance: object) -> None:
    out = Out()
    pieces = [HeldFrame(data) if held else data for data, held in frames]
    waiting = [piece for piece in pieces if isinstance(piece, HeldFrame)]
    chance.shuffle(waiting)  # type: ignore[attr-defined]
    for piece in pieces:
        out.lane.send([piece])
    for held in waiting:
        held.release()
    assert out.bytes == b"".join(data for data, _ in frames)
