"""Codecs: a vector of fp32 elements into fewer bytes, and back.

Nouns: Codec (encodes and decodes as a Compression says), payload (the bytes that ranks send). The native core
(csrc/codecs/) does the work on CPUs, and torch's operators on other devices; both give the same bytes. The
layout of payloads is described in `quantised`, `sparse` and `sampled`. `shoal.parallel` calls it.
"""

from shoal.collectives.codecs.codec import Codec, codec_of

__all__ = ["Codec", "codec_of"]
