"""Processes that are forked from one which has imported everything: a start takes no seconds.

One server serves all workers of a test run. It is started by the first who asks, and ends with the
test run.
"""
