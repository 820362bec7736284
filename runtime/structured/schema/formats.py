"""The enforced string formats, as expressions for whole texts, and the ranges of integer formats."""

from __future__ import annotations

_YEAR = "(?:[1-9][0-9]{3}|0[1-9][0-9]{2}|00[1-9][0-9]|000[1-9])"
_LEAP_YEAR = "(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)"
_DATE = (
    f"(?:{_YEAR}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])"
    f"|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)|02-(?:0[1-9]|1[0-9]|2[0-8]))|{_LEAP_YEAR}-02-29)"
)
_ZONE = "(?:Z|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
_TIME = f"(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\\.[0-9]{{1,9}})?{_ZONE}"  # leap seconds are left out
_CLOCK = "(?:[0-9]{1,9}H(?:[0-9]{1,9}M(?:[0-9]{1,9}S)?)?|[0-9]{1,9}M(?:[0-9]{1,9}S)?|[0-9]{1,9}S)"
_DAYS = "(?:[0-9]{1,9}Y(?:[0-9]{1,9}M(?:[0-9]{1,9}D)?)?|[0-9]{1,9}M(?:[0-9]{1,9}D)?|[0-9]{1,9}D)"
# At most 63 characters. Two hyphens in a row would begin an encoded label.
_LABEL = "(?:[a-zA-Z0-9]{1,63}|[a-zA-Z0-9]{1,19}(?:-[a-zA-Z0-9]{1,10}){1,4})"
_SHORT_LABEL = "(?:[a-zA-Z0-9]{1,62}|[a-zA-Z0-9]{1,18}(?:-[a-zA-Z0-9]{1,10}){1,4})"
_HOSTNAME = f"{_LABEL}(?:\\.{_SHORT_LABEL}){{0,3}}"  # four labels fit a name's 253 characters
_ATOM = "[a-zA-Z0-9!#$%&'*+/=?^_`{|}~-]"
# At most 64 characters in all.
_LOCAL = (
    f"(?:{_ATOM}{{1,64}}|{_ATOM}{{1,31}}\\.{_ATOM}{{1,32}}|{_ATOM}{{1,20}}(?:\\.{_ATOM}{{1,20}}){{2}}"
    f"|{_ATOM}{{1,12}}(?:\\.{_ATOM}{{1,12}}){{3,4}})"
)
_BYTE = "(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_HEX = "[0-9a-fA-F]{1,4}"
_IPV6 = "|".join(
    [
        f"(?:{_HEX}:){{7}}{_HEX}",
        *(f"(?:{_HEX}(?::{_HEX}){{0,{n - 1}}})?::(?:{_HEX}(?::{_HEX}){{0,{6 - n}}})?" for n in range(1, 7)),
    ]
)
_URI_CHAR = "(?:[a-zA-Z0-9._~!$&'()*+,;=:@-]|%[0-9a-fA-F]{2})"

_PATH = f"(?:/{_URI_CHAR}*)*"
_AUTHORITY = f"//{_HOSTNAME}(?::[0-9]{{1,5}})?{_PATH}"
_QUERY = f"(?:\\?(?:{_URI_CHAR}|[/?])*)?(?:#(?:{_URI_CHAR}|[/?])*)?"
_URI = f"(?:[fF][iI][lL][eE]:///{_URI_CHAR}*{_PATH}|[a-zA-Z][a-zA-Z0-9+.-]{{0,15}}:(?:{_AUTHORITY}|/?{_URI_CHAR}+{_PATH})){_QUERY}"
_SEGMENT = "(?:[a-zA-Z0-9._~!$&'()*+,;=@-]|%[0-9a-fA-F]{2})"  # no colon, which would end a scheme
_RELATIVE = f"(?:{_AUTHORITY}|{_SEGMENT}+{_PATH}|/(?:{_URI_CHAR}+{_PATH})?)?{_QUERY}"
_EMAIL = f"{_LOCAL}@{_HOSTNAME}"
_POINTER = "(?:/(?:[^~/]|~[01])*)*"
_REGEX_CHAR = "[a-zA-Z0-9 _@#%&=~<>,;:!\"'/-]"
_REGEX_ATOM = (
    f"(?:{_REGEX_CHAR}|\\.|\\\\[dwsDWS.^$*+?()\\[\\]{{}}|/\\\\-]"
    "|\\[\\^?(?:[a-zA-Z0-9 _@#%&=~<>,;:!\"'/.]|0-9|a-z|A-Z|a-f|A-F|\\\\[dwsDWS.^$*+?()\\[\\]{}|/\\\\-])+\\])"
)
_REGEX_PART = f"{_REGEX_ATOM}(?:[*+?]|\\{{[0-9]{{1,3}}\\}})?"
_REGEX_GROUP = f"\\((?:\\?:)?(?:{_REGEX_PART})+(?:\\|(?:{_REGEX_PART})+)*\\)[*+?]?"
_EXPRESSION = "[a-zA-Z0-9_]{1,32}(?:,[a-zA-Z0-9_]{1,32}){0,7}"
_TEMPLATE = f"(?:{_URI_CHAR}|[/?]|\\{{[+#./;?&]?{_EXPRESSION}\\}})*"

# Internationalized forms are written in ASCII, which they contain.
FORMATS = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}T{_TIME}",
    "duration": f"P(?:{_DAYS}(?:T{_CLOCK})?|T{_CLOCK}|[0-9]{{1,9}}W)",
    "email": _EMAIL,
    "idn-email": _EMAIL,
    "hostname": _HOSTNAME,
    "idn-hostname": _HOSTNAME,
    "ipv4": f"(?:{_BYTE}\\.){{3}}{_BYTE}",
    "ipv6": _IPV6,
    "uri": _URI,
    "iri": _URI,
    "uri-reference": f"(?:{_URI}|{_RELATIVE})",
    "iri-reference": f"(?:{_URI}|{_RELATIVE})",
    "uri-template": _TEMPLATE,
    "uuid": "[0-9a-fA-F]{8}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{12}",
    "json-pointer": _POINTER,
    "relative-json-pointer": f"(?:0|[1-9][0-9]{{0,3}})(?:#|{_POINTER})",
    "regex": f"\\^?(?:{_REGEX_PART}|{_REGEX_GROUP})*\\$?",
}
# Integer formats. Every other format name asserts nothing.
RANGES = {
    "int32": (-(2**31), 2**31 - 1),
    "uint32": (0, 2**32 - 1),
    "int64": (-(2**63), 2**63 - 1),
    "uint64": (0, 2**64 - 1),
}
