"""Image codecs of the separation baseline: bytes for an image at each of many quality levels, and the image again.

Codecs compress one image at a time, and everything a receiver needs besides the codec's name and the image's size is in
the bytes: nothing is shared between the images of a batch. `strip=True` takes containers off that the receiver can
write itself (`chanlab.jscc.separation.containers`); what stays is counted, to the byte.
"""

from __future__ import annotations

import functools
import io
import shutil
import subprocess
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from chanlab.errors import ChanlabError, MissingDependencyError, UsageError
from chanlab.jscc.separation import containers

Picture = npt.NDArray[np.uint8]
"""Red, green and blue, 0 to 255, `[height, width, 3]`."""


class CodecError(ChanlabError):
    """Bytes that are no compressed image."""


@runtime_checkable
class ImageCodec(Protocol):
    """What a codec offers to the baseline; a learned one too.

    Attributes:
        name: Name in tables.
        variants: Settings besides quality, each searched on its own; which one was used must be in the bytes.
        levels: Number of quality levels of each variant: 0 is the worst, size and quality grow with the level.
    """

    name: str
    variants: tuple[str, ...]
    levels: int

    def encode(self, image: Picture, level: int, variant: str) -> bytes:
        """The bytes to send."""
        ...

    def decode(self, data: bytes, shape: tuple[int, int]) -> Picture:
        """The image of such bytes; shape is (height, width). Raises `CodecError` if they are damaged."""
        ...


class PillowCodec(ABC):
    """A format of Pillow.

    Args:
        strip: Take the container off. False sends whole files, as most published baselines do.

    Raises:
        MissingDependencyError: If this Pillow was built without the format.
    """

    name = ""
    format = ""
    feature = ""
    variants: tuple[str, ...] = ("",)
    levels = 101

    def __init__(self, strip: bool = True) -> None:
        try:
            from PIL import features
        except ImportError as error:
            raise MissingDependencyError(f"{self.name} needs Pillow: pip install 'pillow>=11.3'") from error
        if not features.check(self.feature):
            raise MissingDependencyError(
                f"this Pillow was built without {self.name} ({self.feature}); its wheels have it: "
                "pip install --only-binary :all: --upgrade 'pillow>=11.3'"
            )
        self.strip = strip
        self._template = functools.lru_cache(64)(self._make_template)

    def file(self, image: Picture, level: int, variant: str) -> bytes:
        """The whole file."""
        from PIL import Image

        buffer = io.BytesIO()
        Image.fromarray(image).save(buffer, self.format, **self._options(level, variant))
        return buffer.getvalue()

    def encode(self, image: Picture, level: int, variant: str) -> bytes:
        """See `ImageCodec`; the container is rebuilt and compared with the file before it is left out.

        Raises:
            StripError: If the container can't be rebuilt bit for bit.
        """
        if image.ndim != 3 or image.shape[2] != 3 or image.dtype != np.uint8:
            raise UsageError(f"an image is uint8 [height, width, 3], not {image.dtype} {list(image.shape)}.")
        if not 0 <= level < self.levels or variant not in self.variants:
            raise UsageError(f"{self.name} has levels 0..{self.levels - 1} and variants {self.variants}.")
        stream = self.file(image, level, variant)
        if not self.strip:
            return stream
        shape = (image.shape[0], image.shape[1])
        data = self._strip(stream, shape, level, variant)
        if self.wrap(data, shape) != stream:
            raise containers.StripError(f"{self.name}: a stripped file isn't rebuilt: use the codec with strip=False.")
        return data

    def decode(self, data: bytes, shape: tuple[int, int]) -> Picture:
        """See `ImageCodec`."""
        from PIL import Image

        try:
            stream = self.wrap(data, shape) if self.strip else data
            with Image.open(io.BytesIO(stream), formats=[self.format]) as opened:
                image = np.asarray(opened.convert("RGB"))
        except (OSError, ValueError, IndexError, SyntaxError, ChanlabError, RuntimeError) as error:
            raise CodecError(f"no {self.name} image: {error}") from error
        if image.shape[:2] != tuple(shape):
            raise CodecError(f"a {self.name} image of {image.shape[:2]}, not {tuple(shape)}")
        return image

    @abstractmethod
    def wrap(self, data: bytes, shape: tuple[int, int]) -> bytes:
        """The whole file of stripped bytes."""

    @abstractmethod
    def _strip(self, stream: bytes, shape: tuple[int, int], level: int, variant: str) -> bytes: ...

    @abstractmethod
    def _options(self, level: int, variant: str) -> dict[str, Any]: ...

    def _make_template(self, shape: tuple[int, int], level: int, variant: str) -> bytes:
        return self.file(np.full((*shape, 3), 128, np.uint8), level, variant)


class Jpeg(PillowCodec):
    """JPEG: baseline with standard or with its own Huffman tables, or progressive; 4:2:0 or 4:4:4.

    Stripped: two bytes that hold quality and variant, own Huffman tables (counts and symbols), entropy-coded data.
    Quantisation tables, standard Huffman tables and all other headers follow from these two bytes and the image's size.
    """

    name, format, feature = "JPEG", "JPEG", "jpg"
    levels = 100
    variants = tuple(
        f"{tables} {sampling}" for tables in ("standard", "own", "progressive") for sampling in ("4:2:0", "4:4:4")
    )

    def _options(self, level: int, variant: str) -> dict[str, Any]:
        tables, sampling = variant.split()
        return {
            "quality": level + 1,
            "subsampling": sampling,
            "optimize": tables == "own",
            "progressive": tables == "progressive",
        }

    def _strip(self, stream: bytes, shape: tuple[int, int], level: int, variant: str) -> bytes:
        template = self._template(shape, level, variant)
        settings = (self.variants.index(variant) * self.levels + level).to_bytes(2)
        if variant.startswith("standard"):
            return settings + containers.known_prefix(stream, containers.jpeg_scan_header(template), "JPEG")[:-2]
        frame = containers.jpeg_frame_header(template)
        if variant.startswith("own"):
            scan = containers.jpeg_scan_segment(template)
            return settings + containers.strip_jpeg_tables(stream, frame, scan)
        return settings + containers.known_prefix(stream, frame, "JPEG")[:-2]

    def wrap(self, data: bytes, shape: tuple[int, int]) -> bytes:
        """See `PillowCodec`."""
        index, level = divmod(int.from_bytes(data[:2]), self.levels)
        variant = self.variants[index]
        template, rest = self._template(shape, level, variant), data[2:]
        if variant.startswith("standard"):
            return containers.jpeg_scan_header(template) + rest + b"\xff\xd9"
        frame = containers.jpeg_frame_header(template)
        if variant.startswith("own"):
            return containers.wrap_jpeg_tables(rest, frame, containers.jpeg_scan_segment(template))
        return frame + rest + b"\xff\xd9"


class Jpeg2000(PillowCodec):
    """JPEG 2000 (OpenJPEG): a raw codestream, irreversible wavelet, one quality layer, its rate in steps of 2 %.

    Stripped: the packets. All markers follow from the image's size.
    """

    name, format, feature = "JPEG 2000", "JPEG2000", "jpg_2000"
    levels = 400
    _rate_step = 1.02

    def _options(self, level: int, variant: str) -> dict[str, Any]:
        rate = self._rate_step ** (self.levels - 1 - level)  # raw bytes over bytes
        return {"no_jp2": True, "irreversible": True, "mct": 1, "quality_mode": "rates", "quality_layers": [rate]}

    def _strip(self, stream: bytes, shape: tuple[int, int], level: int, variant: str) -> bytes:
        return containers.strip_j2k(stream, self._header(shape))

    def wrap(self, data: bytes, shape: tuple[int, int]) -> bytes:
        """See `PillowCodec`."""
        return containers.wrap_j2k(data, self._header(shape))

    def _header(self, shape: tuple[int, int]) -> bytes:
        return containers.j2k_header(self._template(shape, 0, ""))


class WebP(PillowCodec):
    """Lossy WebP (libwebp, slowest method), quality in steps of a half.

    Stripped: the VP8 frame without start code and size.
    """

    name, format, feature = "WebP", "WEBP", "webp"
    levels = 201

    def _options(self, level: int, variant: str) -> dict[str, Any]:
        return {"quality": level / 2, "method": 6}

    def _strip(self, stream: bytes, shape: tuple[int, int], level: int, variant: str) -> bytes:
        return containers.strip_webp(stream, shape[1], shape[0])

    def wrap(self, data: bytes, shape: tuple[int, int]) -> bytes:
        """See `PillowCodec`."""
        return containers.wrap_webp(data, shape[1], shape[0])


class Avif(PillowCodec):
    """AVIF (libavif with libaom tuned for PSNR), 4:2:0 or 4:4:4.

    Stripped: a byte for the sampling and the payload of the AV1 frame OBU. The boxes of the file, the sequence header
    and the temporal delimiter follow from the image's size and the sampling.

    Args:
        strip: See `PillowCodec`.
        speed: 0 (best) to 10 (fastest); 4 is 0.3 to 0.5 dB above 6 at the same size, and three to five times slower.
            The headers left out depend on it: stripped bytes are read with the speed that wrote them, or are garbage.
    """

    name, format, feature = "AVIF", "AVIF", "avif"
    variants: tuple[str, ...] = ("4:2:0", "4:4:4")

    def __init__(self, strip: bool = True, speed: int = 4) -> None:
        super().__init__(strip)
        from PIL import _avif  # type: ignore[attr-defined]

        if not _avif.encoder_codec_available("aom"):
            raise MissingDependencyError(
                "this Pillow encodes AVIF without libaom, which alone is tuned for PSNR; its wheels have it: "
                "pip install --only-binary :all: --upgrade 'pillow>=11.3'"
            )
        self.speed = speed

    def _options(self, level: int, variant: str) -> dict[str, Any]:
        return {
            "quality": level,
            "subsampling": variant,
            "speed": self.speed,
            "codec": "aom",
            "max_threads": 1,
            "advanced": {"tune": "psnr"},
        }

    def _strip(self, stream: bytes, shape: tuple[int, int], level: int, variant: str) -> bytes:
        template = self._template(shape, 50, variant)
        return bytes([self.variants.index(variant)]) + containers.strip_avif(stream, template)

    def wrap(self, data: bytes, shape: tuple[int, int]) -> bytes:
        """See `PillowCodec`."""
        return containers.wrap_avif(data[1:], self._template(shape, 50, self.variants[data[0]]))


class Bpg:
    """BPG by its programs `bpgenc` and `bpgdec`; whole files are sent, nothing is stripped.

    Raises:
        MissingDependencyError: If the programs are not on the path.
    """

    name = "BPG"
    variants: tuple[str, ...] = ("420", "444")
    levels = 52

    def __init__(self) -> None:
        missing = [p for p in ("bpgenc", "bpgdec") if shutil.which(p) is None]
        if missing:
            raise MissingDependencyError(
                f"{' and '.join(missing)} not on the path: build libbpg (bellard.org/bpg) and install its programs."
            )

    def encode(self, image: Picture, level: int, variant: str) -> bytes:
        """See `ImageCodec`; level 51 - q is quantiser q."""
        from PIL import Image

        with tempfile.TemporaryDirectory() as folder:
            source, target = Path(folder, "in.png"), Path(folder, "out.bpg")
            Image.fromarray(image).save(source)
            options = ["-q", str(self.levels - 1 - level), "-f", variant]
            self._run("bpgenc", *options, "-o", str(target), str(source))
            return bytes(target.read_bytes())

    def decode(self, data: bytes, shape: tuple[int, int]) -> Picture:
        """See `ImageCodec`."""
        from PIL import Image

        with tempfile.TemporaryDirectory() as folder:
            source, target = Path(folder, "in.bpg"), Path(folder, "out.png")
            source.write_bytes(data)
            try:
                self._run("bpgdec", "-o", str(target), str(source))
                image = np.asarray(Image.open(target).convert("RGB"))
            except (ChanlabError, OSError) as error:
                raise CodecError(f"no BPG image: {error}") from error
        if image.shape[:2] != tuple(shape):
            raise CodecError(f"a BPG image of {image.shape[:2]}, not {tuple(shape)}")
        return image

    @staticmethod
    def _run(*command: str) -> None:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise ChanlabError(f"{command[0]} failed: {done.stderr.strip()[-300:]}")


class CompressAI:
    """Learned codecs with CompressAI's interface, one network per quality level.

    Sent: for each of a network's strings its length (two bytes, four from 65,535 on; the last one needs none), then the
    strings. The shape of the latents follows from the image's size: it is read off the network once for each size.

    Args:
        networks: Trained networks, worst quality first, `update()` called: `compress(x)` gives `strings` and `shape`,
            `decompress(strings, shape)` gives `x_hat`, images `[1, 3, height, width]` in [0, 1].
        name: Name in tables.
        multiple: Images are padded (edge values) to multiples of it, as the networks' strides ask.
    """

    variants: tuple[str, ...] = ("",)

    def __init__(self, networks: Sequence[Any], name: str = "learned", multiple: int = 64) -> None:
        if not networks:
            raise UsageError("a learned codec needs at least one network.")
        self.networks, self.name, self.multiple = list(networks), name, multiple
        self.levels = len(self.networks)
        self._shape = functools.lru_cache(64)(self._latent_shape)

    def encode(self, image: Picture, level: int, variant: str) -> bytes:
        """See `ImageCodec`; the first byte is the level."""
        out = self._compress(image, level)
        if tuple(out["shape"]) != self._shape(image.shape[:2], level) or any(len(s) != 1 for s in out["strings"]):
            raise UsageError(f"{self.name}: compress() must give one string each and a shape that the size decides.")
        strings: list[bytes] = [s[0] for s in out["strings"]]
        parts = [self._length(len(s)) + s for s in strings[:-1]]
        return bytes([level, len(strings)]) + b"".join(parts) + strings[-1]

    def decode(self, data: bytes, shape: tuple[int, int]) -> Picture:
        """See `ImageCodec`."""
        import torch

        try:
            level, count, at = data[0], data[1], 2
            strings = []
            for _ in range(count - 1):
                size, at = int.from_bytes(data[at : at + 2]), at + 2
                if size == 0xFFFF:
                    size, at = int.from_bytes(data[at : at + 4]), at + 4
                strings.append([data[at : at + size]])
                at += size
            strings.append([data[at:]])
            with torch.inference_mode():
                out = self.networks[level].decompress(strings, self._shape(tuple(shape), level))["x_hat"]
        except (IndexError, ValueError, RuntimeError) as error:
            raise CodecError(f"no {self.name} image: {error}") from error
        pixels = (out[0, :, : shape[0], : shape[1]].clamp(0, 1) * 255).round().to(torch.uint8)
        return np.asarray(pixels.permute(1, 2, 0).cpu().numpy(), np.uint8)

    def _compress(self, image: Picture, level: int) -> dict[str, Any]:
        import torch

        fill = [(0, -side % self.multiple) for side in image.shape[:2]]
        padded = np.pad(image, (*fill, (0, 0)), mode="edge")
        x = torch.from_numpy(padded).permute(2, 0, 1)[None].float() / 255
        with torch.inference_mode():
            return dict(self.networks[level].compress(x))

    def _latent_shape(self, shape: tuple[int, int], level: int) -> tuple[int, ...]:
        return tuple(self._compress(np.full((*shape, 3), 128, np.uint8), level)["shape"])

    @staticmethod
    def _length(size: int) -> bytes:
        return size.to_bytes(2) if size < 0xFFFF else b"\xff\xff" + size.to_bytes(4)


CODECS: dict[str, Callable[[], ImageCodec]] = {
    "jpeg": Jpeg,
    "jpeg2000": Jpeg2000,
    "webp": WebP,
    "avif": Avif,
    "bpg": Bpg,
}
"""Codecs by the names that scripts take."""


def find_codec(codec: str | ImageCodec) -> ImageCodec:
    """A codec by its name (stripped), or the one given.

    Raises:
        UsageError: If the name is unknown.
        MissingDependencyError: If what it needs is missing.
    """
    if not isinstance(codec, str):
        return codec
    if codec not in CODECS:
        raise UsageError(f"unknown codec {codec!r}; codecs are {', '.join(CODECS)}, or an object like ImageCodec.")
    return CODECS[codec]()


def available_codecs() -> list[str]:
    """Names of the codecs that work here."""
    found = []
    for name in CODECS:
        try:
            find_codec(name)
        except MissingDependencyError:
            continue
        found.append(name)
    return found
