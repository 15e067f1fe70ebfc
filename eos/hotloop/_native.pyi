# As in python.py.
from eos.hotloop.python import encode_key as encode_key
from eos.hotloop.python import fast_out as fast_out
from eos.hotloop.python import fast_state as fast_state
from eos.hotloop.python import feed_outs as feed_outs
from eos.hotloop.python import feed_values as feed_values
from eos.hotloop.python import fetched_of as fetched_of
from eos.hotloop.python import records_of as records_of
from eos.hotloop.python import runs_of as runs_of

SOURCE: int
