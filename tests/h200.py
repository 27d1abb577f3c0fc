"""What an H200 has, for rules that are tested without one."""
SHARED_BYTES = 232_448                        # of a block, at most
# of so many blocks, at a time
CLUSTERS = {1: 132, 2: 66, 3: 39, 4: 30, 5: 22, 6: 17, 7: 15, 8: 15, 9: 9, 10: 7, 11: 7, 12: 7, 13: 7, 14: 7, 15: 7, 16: 7}
