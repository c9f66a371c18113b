#!/usr/bin/env python3
"""Writes the fuzzers' seeds (tests/fuzz/corpus): small valid files of every kind, and some with contents that readers disagree on.

The files are kept in the repository; nobody needs to run this to fuzz. What isn't written here once broke something.
"""

import json
import pathlib
import struct

CORPUS = pathlib.Path(__file__).parent / "corpus"


def write(name: str, content: bytes | str) -> None:
    path = CORPUS / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())


def safetensors(header: dict | str, data: bytes = b"", pad: bool = True) -> bytes:
    text = (header if isinstance(header, str) else json.dumps(header, separators=(",", ":"))).encode()
    if pad:
        text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + data


def entry(dtype: str, shape: list[int], begin: int, end: int) -> dict:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def safetensors_seeds() -> None:
    write("safetensors/none.safetensors", safetensors({}))
    write("safetensors/one.safetensors", safetensors({"w": entry("F32", [2, 2], 0, 16)}, bytes(16)))
    write("safetensors/metadata.safetensors", safetensors({"__metadata__": {"format": "pt", "a": "b"}, "w": entry("BF16", [3], 0, 6)}, bytes(6)))
    dtypes = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1}
    header, position = {}, 0
    for i, (dtype, size) in enumerate(sorted(dtypes.items(), key=lambda item: -item[1])):
        header[f"t{i}"] = entry(dtype, [], position, position + size)
        position += size
    write("safetensors/dtypes.safetensors", safetensors(header, bytes(position)))
    empty = {"a": entry("U8", [0], 0, 0), "b": entry("F64", [3, 0, 2], 0, 0), "c": entry("I8", [1, 1, 1], 0, 1)}
    write("safetensors/empty.safetensors", safetensors(empty, bytes(1)))
    write("safetensors/large.safetensors", safetensors({"w": entry("F64", [2**40, 2**40, 2**40], 0, 2**62)}))
    write("safetensors/twice.safetensors", safetensors('{"w":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"w":{"dtype":"I8","shape":[1],"data_offsets":[0,1]}}', b"x"))
    write("safetensors/hole.safetensors", safetensors({"a": entry("U8", [1], 0, 1), "b": entry("U8", [1], 2, 3)}, bytes(3)))
    write("safetensors/nested.safetensors", safetensors('{"w":' + "[" * 40 + "]" * 40 + "}"))
    write("safetensors/length.safetensors", struct.pack("<Q", 2**63) + b"{}")


def rank_file_seeds() -> None:
    identity = {"format": "titan rank file 1", "run_id": "0123456789abcdef" * 2, "step": "40", "rank": "1", "world_size": "4"}
    metadata = identity | {"model.w": "2:4,0:2 xxh3:0123456789abcdef", "optimizer.step": "xxh3:fedcba9876543210", "z": "0:0 xxh3:"}
    header = {"__metadata__": metadata, "model.w": entry("F32", [2, 2], 0, 16), "optimizer.step": entry("F32", [], 16, 20), "z": entry("U8", [0], 20, 20)}
    write("rank_file/three.safetensors", safetensors(header, bytes(20)))
    write("rank_file/none.safetensors", safetensors({"__metadata__": identity}))
    beyond = identity | {"w": f"{2**63 - 1}:{2**63},1:0 xxh3:0,"}
    write("rank_file/beyond.safetensors", safetensors({"__metadata__": beyond, "w": entry("U8", [1, 1], 0, 1)}, b"x"))


def manifest_seeds() -> None:
    files = [[1000 + rank, f"{rank:032x}"] for rank in range(8)]

    def manifest(layouts: list, tensors: list, files: list = files, **values) -> str:
        body = {"run_id": "0123456789abcdef" * 2, "step": 40, "library": "titan 0.1.0, torch 2.11.0", "num_threads": 2, "finite": True,
                "config": "[training]\nsteps = 40\n", "texts": {"dataloader": '{"steps":40,"num_lanes":1,"feed":"f","lanes":[[0,1,2,3]]}', "train_state": "{}"},
                "layouts": layouts, "tensors": tensors, "files": files} | values
        return '{"titan_checkpoint":1,"digest":"' + "0" * 32 + '",\n"manifest":' + json.dumps(body, separators=(",", ":")) + "}\n"

    def axis(name: str, size: int, stride: int, dim: int = -1, only: int = -1) -> dict:
        return {"axis": name, "size": size, "stride": stride, "dim": dim, "only": only}

    layouts = [[], [axis("dp_shard", 2, 2, dim=0), axis("tp", 2, 1, dim=1)], [axis("pp", 2, 4, only=1), axis("dp_shard", 4, 1, dim=0)]]
    tensors = [["model.norm.weight", "F32", [7], 0], ["model.w", "BF16", [10, 3], 1], ["model.layers.1.w", "F32", [5, 2, 2], 2],
               ["optimizer.step", "F32", [], 0], ["empty", "U8", [0, 4], 1]]
    write("manifest/eight.json", manifest(layouts, tensors))
    write("manifest/one.json", manifest([[]], [["w", "F32", [2, 2], 0]], files[:1], config="", texts={}))
    write("manifest/none.json", manifest([], [], files[:1]))
    write("manifest/pieces.json", manifest([[]], [["large", "F64", [2**20, 5], 0], ["long", "I64", [2**56], 0]]))
    write("manifest/overflow.json", manifest([[axis("tp", 2**62, 2, dim=0)]], [["w", "F64", [2**62, 2**62], 0]]))
    write("manifest/dependent.json", manifest([[axis("a", 4, 1, dim=0), axis("b", 2, 2, dim=0)]], [["w", "F32", [9], 0]]))


def npy(header: str, data: bytes = b"", version: int = 1) -> bytes:
    text = header.encode() + b"\n"
    return b"\x93NUMPY" + bytes([version, 0]) + struct.pack("<H" if version == 1 else "<I", len(text)) + text + data


def npy_seeds() -> None:
    def header(shape: str, descr: str = "'<i4'", order: str = "False") -> str:
        return f"{{'descr': {descr}, 'fortran_order': {order}, 'shape': {shape}, }}"

    for version in (1, 2, 3):
        write(f"npy/version_{version}.npy", npy(header("(1, 2, 3)"), struct.pack("<6i", *range(6)), version))
    write("npy/empty.npy", npy(header("(0, 2, 3)")))
    write("npy/order.npy", npy('{"shape":(1,1,1,),"fortran_order":False,"descr":"<i4"}', bytes(4)))
    write("npy/large.npy", npy(header("(4611686018427387904, 4, 4)")))
    write("npy/int64.npy", npy(header("(1, 1, 1)", "'<i8'"), bytes(8)))


def json_lines_seeds() -> None:
    write("json_lines/plain.jsonl", '{"text": "one"}\n{"id": 7, "text": "t\\u00fc\\n2"}\n')
    write("json_lines/ends.jsonl", '\r\n{"text": ""}\r\n  \n{"text": "\\ud83d\\ude42"}')
    write("json_lines/broken.jsonl", '{"text": "one"}\n{"text": \n[1]\n{"texts": 1}\n{"text": 1}\n{"text": "two", "a": [[{}]]}\n')
    write("json_lines/other.jsonl", b'{"text": "\xff"}\n{"text": 1e999}\n{"text": "a"}\x00\n')


def hugging_face_seeds() -> None:
    llama = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 2,
             "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 128, "max_position_embeddings": 512, "rms_norm_eps": 1e-05,
             "rope_theta": 500000.0, "tie_word_embeddings": False, "hidden_act": "silu", "attention_bias": False, "mlp_bias": False,
             "head_dim": 16, "torch_dtype": "bfloat16", "bos_token_id": 1, "eos_token_id": [2, 3], "rope_scaling": None}
    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    write("hf_config/llama.json", json.dumps(llama))
    write("hf_config/scaled.json", json.dumps(llama | {"rope_scaling": scaling}))
    write("hf_config/parameters.json", json.dumps(llama | {"rope_parameters": scaling | {"rope_theta": 1e4}}, indent=1))
    write("hf_config/extremes.json", json.dumps(llama | {"hidden_size": 2**62, "num_hidden_layers": 10000, "rms_norm_eps": 5e-324}))
    write("hf_config/other.json", '{"a.b": 1, "a": {"b": [1, -2.5, null, true, {"c": []}]}, "d": 18446744073709551615}')
    first, second = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
    write("hf_index/two.json", json.dumps({"metadata": {"total_size": 1234}, "weight_map": {"model.embed_tokens.weight": first, "lm_head.weight": second}}, indent=2))
    write("hf_index/paths.json", '{"weight_map": {"a": "../x.safetensors", "b": "/x.safetensors", "c": "x\\u0000.safetensors", "d": ".safetensors"}}')
    write("hf_index/shapes.json", '{"weight_map": {"a": {"b": "c.safetensors"}, "d": ["e.safetensors"], "f": 1}, "x": [[[1]]]}')


def byte_alphabet() -> list[str]:
    visible = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in visible]
    return [chr(byte) if byte in visible else chr(256 + others.index(byte)) for byte in range(256)]


LLAMA3 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def tokenizer_seeds() -> None:
    vocabulary = {token: i for i, token in enumerate(byte_alphabet())} | {"ab": 256, "abc": 257, "bc": 258}
    bytes_only = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False}
    tree = {"added_tokens": [{"id": 259, "content": "<s>", "special": True}, {"id": 260, "content": "<s>>", "normalized": True}], "normalizer": None,
            "pre_tokenizer": {"type": "Sequence", "pretokenizers": [{"type": "Split", "pattern": {"Regex": LLAMA3}, "behavior": "Isolated"}, bytes_only]},
            "post_processor": {"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "<s>"}}, {"Sequence": {"id": "A"}}]},
            "decoder": {"type": "ByteLevel"},
            "model": {"type": "BPE", "ignore_merges": False, "merges": [["b", "c"], ["a", "b"], ["a", "bc"]], "vocab": vocabulary}}

    def text(tree: dict, config: dict | None = None) -> str:
        # The varying parts first, and the long vocabulary last.
        return json.dumps(tree, ensure_ascii=False, separators=(",", ":")) + ("" if config is None else "\n====\n" + json.dumps(config))

    write("tokenizer/llama3.txt", text(tree))
    config = {"bos_token": "<s>", "eos_token": {"content": "<s>>"}}
    older = tree | {"model": tree["model"] | {"merges": ["b c", "a b"], "ignore_merges": True}, "pre_tokenizer": {"type": "ByteLevel"}, "post_processor": None}
    write("tokenizer/older.txt", text(older, config))
    holes = tree | {"added_tokens": [{"id": 2**28, "content": "<far>", "special": True}]}
    write("tokenizer/holes.txt", text(holes))

    sample = "\n====\nIt's  12345 ab cé\r\n €x_y\t 🙂\n"
    parts = {"llama3": tree["pre_tokenizer"], "gpt2": {"type": "ByteLevel", "add_prefix_space": True, "use_regex": True},
             "digits": {"type": "Sequence", "pretokenizers": [{"type": "Digits", "individual_digits": True}, bytes_only]}}
    for behavior in ("Isolated", "Removed", "MergedWithPrevious", "MergedWithNext", "Contiguous"):
        parts[behavior] = {"type": "Split", "pattern": {"String": " "}, "behavior": behavior, "invert": behavior == "Removed"}
    for name, pattern in {"classes": r"\w+|[^\W\d]|\s|[\p{Lu}\p{^N}]|(?<=a)b|(?!\S)\P{L}", "hostile": "(a+)+$|(x+x+)+y", "empty": "a*|", "keep": r"a\Kb|\R|\X|(?R)?c"}.items():
        parts[name] = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated"}
    for name, part in parts.items():
        write(f"pre_tokenizer/{name.lower()}.txt", json.dumps(part, separators=(",", ":")) + sample)


def config_seeds() -> None:
    settings = {"model": {"name": "large", "args": {"tie": True, "dim": 3}},
                "training": {"seq_len": 128, "max_norm": 2, "steps": 1e3, "dataset_path": "data/ä", "dataloader": {"pin_memory": True}},
                "optimizer": {"lr": 1e-3, "eps": None, "seed": 7, "groups": ["norm", "bias"], "stages": [["a", "b"], []], "learning_rate": 0.5},
                "validation": {"enable": False, "whole_set": True, "steps": -1}, "quantize": {"linear": {"float8": {"filter_fqns": ["output"]}}}}
    write("config_json/settings.json", json.dumps(settings, ensure_ascii=False))
    write("config_json/unknown.json", '{"trainin": {"stps": 1}, "training": {"gc_debug": true, "steps": 0.5}, "optimizer": {"name": "Adamw", "lr": "inf", "method": 1}}')
    write("config_json/include.json", '{"include": ["strange.json", "nowhere.toml"], "a": {"b": [[1, -2], [null, {"q": [{}]}]]}}')
    write("config_json/values.json", '{"a": 12345678901234567890, "b": -9223372036854775808, "c": 1e308, "d": "\\ud83d\\ude42\\n\\u0000", "d": 1}')
    write("config_toml/settings.toml", """[model]
name = "large"
args.dim = 3
[training]
seq_len = 128 # tokens
max_norm = 2
steps = 1e3
dataset_path = "data/ä"
dataloader.pin_memory = true
[optimizer]
lr = 1e-3
seed = 7
groups = ["norm", "bias"]
stages = [["a", "b"], []]
[quantize.linear.float8]
filter_fqns = ["output"]
""")
    write("config_toml/syntax.toml", "include = [\"a.toml\"]\n[a.b]\nc = 1.5e3 # note\n\"d.e\" = '''x\ny'''\nf = [[1, 2], [\"\\u00e9\"]]\n"
          "g = {h = true, i.j = 0x1f}\n[[k]]\nl = 1979-05-27T07:32:00Z\nm = [inf, -nan, 0o17, 0b1, 1_000]\nn = \"\"\"\\\n  x\"\"\"\n")
    write("config_toml/unknown.toml", "[trainin]\nstps = 1\n[training]\ngc_debug = true\nsteps = 0.5\n[optimizer]\nname = 'Adamw'\nlr = nan\nfused = 1\n")
    write("config_toml/unset.toml", "[validation]\nenable = true\nsubset = 3\n[optimizer]\nschedule = 'x'\neps = -0.0\nbeta1 = 2\n")


def flight_file_seeds() -> None:
    gather = {"process_group": ["0", "dp"], "collective_seq_id": 1, "p2p_seq_id": 0, "input_sizes": [[4]], "input_dtypes": ["Float"],
              "output_sizes": [[8]], "output_dtypes": ["Float"], "time_created_ns": 1699999998000000000, "time_discovered_completed_ns": 0}
    pair = {"record_id": 1, "process_group": ["0", "dp"], "p2p_seq_id": 2, "is_p2p": True}
    groups = {"0": {"name": "0", "desc": "dp", "purpose": "", "ranks": "[0, 1]"}}
    who = {"rank": 1, "world_size": 2, "host": "n", "reason": "SIGQUIT", "time_ns": 1700000000000000000, "activity": "data", "step": 3,
           "activity_since_ns": 1699999999000000000}
    titan = [gather | {"record_id": 0, "profiling_name": "titan:all_gather", "phase": "fsdp::unshard", "module": "layers.3", "state": "started"},
             pair | {"profiling_name": "titan:receive 1<-0", "state": "failed"}]
    torch = [gather | {"record_id": 0, "profiling_name": "nccl:_all_gather_base", "state": "completed", "duration_ms": 0.5},
             pair | {"process_group": ["1", ""], "profiling_name": "nccl:send 0->1", "state": "scheduled"}]
    write("flight_file/titan.json", json.dumps({"version": "2.10", "titan": who, "pg_config": groups, "entries": titan}))
    write("flight_file/torch.json", json.dumps({"version": "2.10", "pg_config": groups, "pg_status": {}, "entries": torch}))


def main() -> None:
    for make in (safetensors_seeds, rank_file_seeds, manifest_seeds, npy_seeds, json_lines_seeds, hugging_face_seeds, tokenizer_seeds, config_seeds, flight_file_seeds):
        make()


if __name__ == "__main__":
    main()
