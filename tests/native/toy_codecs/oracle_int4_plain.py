"""The toy codec `int4_plain`: what tells it from the other group codecs. (format, bits of a code,
form B)"""

from oracle_values import Int

FORMAT = Int(4, top=7), 4, (3, 1, 3, 2, 24)
