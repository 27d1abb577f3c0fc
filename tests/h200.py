"""What an H200 has, for rules that are tested without one."""
SHARED_BYTES = 232_448                        # of a block, at most
CLUSTERS = {1: 132, 2: 66, 4: 30, 8: 15, 16: 7}    # of so many blocks, at a time
