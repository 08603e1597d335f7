"""Know where each gradient lies.

``parameters``: the table of an optimizer's parameters, by name. ``dtensors``: what this rank holds of one that is
spread over ranks. ``layout``: slots, lanes and segments, as pure functions. ``arena``: the memory behind a lane.
``nonfinite``: who has an infinity or a NaN. ``squares``: sums of them, with the same bits everywhere.

May import sparsifiers (its memories and kernels), and nothing else of the house.
"""
