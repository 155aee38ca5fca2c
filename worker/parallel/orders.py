"""What rank 0 tells the others to do; the first number of a message says which."""

from __future__ import annotations

from enum import IntEnum


class Order(IntEnum):
    """ALLOCATE: followed by the blocks of the KV pool. STEP: by the numbers and arrays of a step. OPEN_STORE,
    MOVE, CLEAR_STORE and CLOSE_DISK: see `stores.py`."""

    ALLOCATE = 1
    RECORD = 2
    SETTLE = 3
    STEP = 4
    END = 5
    OPEN_STORE = 6
    MOVE = 7
    CLEAR_STORE = 8
    CLOSE_DISK = 9
