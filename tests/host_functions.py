"""Device functions as plain Python, with integers that wrap as the device's do."""
import types


def plain(function, made=None):
    """A device function and all those that it calls, to be called on the host."""
    made = {} if made is None else made
    source = function.py_func
    if source not in made:
        wraps = {"uint32": lambda value: int(value) & 0xFFFFFFFF, "uint64": lambda value: int(value) & (2**64 - 1)}
        scope = {**source.__globals__, **wraps}
        made[source] = types.FunctionType(source.__code__, scope)
        scope.update({name: plain(value, made) for name, value in scope.items() if hasattr(value, "py_func")})
    return made[source]
