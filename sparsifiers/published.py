# SPDX-License-Identifier: Apache-2.0
"""Names of compressors in papers and their code: the one table of these, for scripts and command lines.

Keys are spelled as `sparsifiers.registry.spelling` does. Names of planners and exchanges are the business of
other packages.
"""

from __future__ import annotations

# Other names for the canonical ones: accepted, not listed.
SPARSIFIERS = {
    "tradtopk": "topk",
    "globaltopk": "topk",
    "eftopk": "topk",
    "topkef": "topk",
    "topka": "topk",
    "adtopki": "adtopk",
    "allchanneltopk": "adtopk-row",
    "adtopkf": "adtopk-fill",
    "gaussian": "gaussiank",
    "dgcsampling": "dgc",
    "sidco": "sidco-e",
    "sidcoexp": "sidco-e",
    "sidcogam": "sidco-gamma",
}
LOW_RANK = {
    "powersgdhook": "powersgd",
    "rankk": "powersgd",
    "rankkreducer": "powersgd",
    "acp": "acpsgd",
    "halfrankkreducer": "acpsgd",
}
QUANTISERS = {
    "eden": "eden-2",
    "drive": "eden-1",
    "8bit": "int8",
    "u8bit": "int8",
    "bytegrad": "int8",
    "qgz": "int8",
    "4bit": "int4",
    "float8": "fp8",
    "e4m3": "fp8",
    "signsgd": "onebit",
    "efsignsgd": "onebit",
    "signum": "onebit",
    "1bit": "onebit",
}

# Names that are none of ours, with the nearest one: they are refused, with that name.
NEAREST_SPARSIFIER = {
    "deepgradientcompression": "dgc",
    # Sums of top-k selections: Ok-Topk's and SparCML's names.
    **dict.fromkeys(("oktopk", "gtopk", "gtopksgd", "topksa", "topkdsa", "topka2", "topkaopt"), "topk"),
    **dict.fromkeys(("lags", "lagssgd"), "topk"),
    **dict.fromkeys(("gaussianksa", "gaussiankconcat"), "gaussiank"),
}
NEAREST_LOW_RANK = {"batchedpowersgd": "powersgd", "batchedpowersgdhook": "powersgd", "atomo": "powersgd"}
NEAREST_QUANTISER = {
    # GRACE's, which are rounded to powers of two, or to the bits beside an exponent.
    **dict.fromkeys(("natural", "naturalcuda", "inceptionn", "u8", "uint8", "uniform8bit", "quantile8bit"), "int8"),
    **dict.fromkeys(("blockwise8bit", "quantizationpertensor", "quantizationperchannel"), "int8"),
    **dict.fromkeys(("qsgdcuda", "dithering"), "qsgd"),
    **dict.fromkeys(("sketch", "sketchml"), "int4"),
    "adaq": "onebit",
    "1bitsgd": "onebit",
    "fp8e4m3": "fp8",
}
