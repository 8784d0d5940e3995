"""Containers of compressed images, taken off before transmission and rebuilt by the receiver, bit for bit.

A receiver that knows the codec, its settings and the size of the image can write most of a file's header itself. Each
function pair below keeps what it cannot: `strip_*` gives the bytes to send, `wrap_*` the file again. The known part is
taken from a template: the file of a grey image with the same size and settings, which both ends can make.
"""

from __future__ import annotations

import struct

from chanlab.errors import ChanlabError

_EOI = b"\xff\xd9"


class StripError(ChanlabError):
    """A file isn't laid out as its template is: its container can't be taken off."""


def known_prefix(stream: bytes, known: bytes, kind: str) -> bytes:
    """What follows a part that both ends know.

    Raises:
        StripError: If the stream doesn't begin with it.
    """
    if not stream.startswith(known):
        raise StripError(f"this {kind} file has another header than its template: use the codec with strip=False.")
    return stream[len(known) :]


# JPEG (ITU-T T.81, annex B)


def _segments(stream: bytes, until: tuple[int, ...]) -> tuple[list[bytes], int]:
    """Marker segments after SOI through the first of some markers; where the next one begins."""
    at, segments = 2, []
    while True:
        length = 2 + struct.unpack_from(">H", stream, at + 2)[0]
        segments.append(stream[at : at + length])
        at += length
        if segments[-1][1] in until:
            return segments, at


def jpeg_frame_header(template: bytes) -> bytes:
    """SOI through SOF: sizes, sampling and quantisation tables, known from quality, subsampling and image size."""
    return template[: _segments(template, (0xC0, 0xC1, 0xC2))[1]]


def jpeg_scan_header(template: bytes) -> bytes:
    """SOI through SOS: standard Huffman tables too."""
    return template[: _segments(template, (0xDA,))[1]]


def strip_jpeg_tables(stream: bytes, frame: bytes, scan: bytes) -> bytes:
    """A baseline JPEG with its own Huffman tables -> counts and symbols of each, and the entropy-coded data.

    Args:
        stream: The file.
        frame: `jpeg_frame_header` of the template.
        scan: The template's SOS segment.
    """
    rest = b"\xff\xd8" + known_prefix(stream, frame, "JPEG")
    segments, at = _segments(rest, (0xDA,))
    tables, sos = segments[:-1], segments[-1]
    ids = [t[4] for t in tables]
    if (
        sos != scan
        or ids != [0x00, 0x10, 0x01, 0x11]
        or any(t[1] != 0xC4 or len(t) != 21 + sum(t[5:21]) for t in tables)
    ):
        raise StripError("this JPEG file has unusual Huffman tables: use the codec with strip=False.")
    return b"".join(t[5:] for t in tables) + rest[at : -len(_EOI)]


def wrap_jpeg_tables(payload: bytes, frame: bytes, scan: bytes) -> bytes:
    """The inverse of `strip_jpeg_tables`."""
    out, at = frame, 0
    for table in (0x00, 0x10, 0x01, 0x11):
        end = at + 16 + sum(payload[at : at + 16])
        out += b"\xff\xc4" + struct.pack(">HB", end - at + 3, table) + payload[at:end]
        at = end
    return out + scan + payload[at:] + _EOI


def jpeg_scan_segment(template: bytes) -> bytes:
    """The SOS segment."""
    return _segments(template, (0xDA,))[0][-1]


# JPEG 2000 codestream (ITU-T T.800, annex A)

_SOD = b"\xff\x93"


def j2k_header(template: bytes) -> bytes:
    """SOC through the last marker before the tile part: image size, coding style, quantisation, comment."""
    at = 2
    while template[at : at + 2] != b"\xff\x90":
        at += 2 + struct.unpack_from(">H", template, at + 2)[0]
    return template[:at]


def strip_j2k(stream: bytes, header: bytes) -> bytes:
    """A raw codestream of one tile part -> its packets."""
    rest = known_prefix(stream, header, "JPEG 2000")
    if rest[12:14] != _SOD or rest[-2:] != _EOI or rest[:12] != _tile_part(len(rest) - 2):
        raise StripError("this JPEG 2000 codestream has more than one tile part: use the codec with strip=False.")
    return rest[14:-2]


def wrap_j2k(payload: bytes, header: bytes) -> bytes:
    """The inverse of `strip_j2k`."""
    return header + _tile_part(14 + len(payload)) + _SOD + payload + _EOI


def _tile_part(length: int) -> bytes:
    """SOT of the only tile part."""
    return b"\xff\x90" + struct.pack(">HHIBB", 10, 0, length, 0, 1)


# WebP, lossy (RFC 9649; VP8 frame header: RFC 6386, 9.1)

_START_CODE = b"\x9d\x01\x2a"


def strip_webp(stream: bytes, width: int, height: int) -> bytes:
    """A lossy WebP file -> its VP8 frame without start code and size (the frame tag stays: a partition's length)."""
    if stream[:4] != b"RIFF" or stream[8:16] != b"WEBPVP8 ":
        raise StripError("this WebP file is not a lossy one without extensions: use the codec with strip=False.")
    size = struct.unpack_from("<I", stream, 16)[0]
    frame = stream[20 : 20 + size]
    if frame[3:10] != _START_CODE + struct.pack("<HH", width, height):
        raise StripError("this WebP file has an unusual VP8 frame: use the codec with strip=False.")
    return frame[:3] + frame[10:]


def wrap_webp(payload: bytes, width: int, height: int) -> bytes:
    """The inverse of `strip_webp`."""
    frame = payload[:3] + _START_CODE + struct.pack("<HH", width, height) + payload[3:]
    chunk = b"VP8 " + struct.pack("<I", len(frame)) + frame + b"\0" * (len(frame) % 2)
    return b"RIFF" + struct.pack("<I", 4 + len(chunk)) + b"WEBP" + chunk


# AVIF (ISO/IEC 14496-12, 23000-22; AV1 low-overhead bitstream, 5.3)

_FRAME_OBU = 6


def strip_avif(stream: bytes, template: bytes) -> bytes:
    """A still AVIF file -> the payload of its frame OBU."""
    for kind, header, payload in _obus(_mdat(stream)[1]):
        if kind == _FRAME_OBU and header[0] == (_FRAME_OBU << 3 | 2):
            if wrap_avif(payload, template) == stream:
                return payload
            break
    raise StripError("this AVIF file has other boxes than its template: use the codec with strip=False.")


def wrap_avif(payload: bytes, template: bytes) -> bytes:
    """The inverse of `strip_avif`: the template's boxes and sequence header, lengths put right."""
    boxes, items = _mdat(template)
    before = b"".join(h + p for kind, h, p in _obus(items) if kind != _FRAME_OBU)
    data = before + bytes([_FRAME_OBU << 3 | 2]) + _leb128(len(payload)) + payload
    location = struct.pack(">I", len(items))
    if boxes.count(b"iloc") != 1:
        raise StripError("this AVIF file has more than one item location: use the codec with strip=False.")
    at = boxes.index(location, boxes.index(b"iloc"))
    boxes = boxes[:at] + struct.pack(">I", len(data)) + boxes[at + 4 :]
    return boxes + struct.pack(">I", 8 + len(data)) + b"mdat" + data


def _mdat(stream: bytes) -> tuple[bytes, bytes]:
    """All boxes before the media data box, and its content."""
    at = 0
    while at + 8 <= len(stream):
        size, kind = struct.unpack_from(">I4s", stream, at)
        if kind == b"mdat" and at + size == len(stream):
            return stream[:at], stream[at + 8 :]
        if size < 8:
            break
        at += size
    raise StripError("this AVIF file doesn't end with its media data: use the codec with strip=False.")


def _obus(data: bytes) -> list[tuple[int, bytes, bytes]]:
    """(type, header with length, payload) of each open bitstream unit; all have a length field."""
    out, at = [], 0
    while at < len(data):
        begin, size, shift = at, 0, 0
        at += 2 if data[at] & 4 else 1
        while True:
            byte = data[at]
            size, shift, at = size | (byte & 127) << shift, shift + 7, at + 1
            if byte < 128:
                break
        out.append((data[begin] >> 3 & 15, data[begin:at], data[at : at + size]))
        at += size
    return out


def _leb128(value: int) -> bytes:
    out = b""
    while value >= 128:
        out += bytes([value & 127 | 128])
        value >>= 7
    return out + bytes([value])
