"""Define the App of our own sweep, on a worker that keeps its producer where the product replaces it."""

from __future__ import annotations

from tests.support.sessions import keep_producers
from tests.support.sweep_app import app as app

keep_producers()
