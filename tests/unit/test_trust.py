"""The threat page: what it says is in the tree, and every test that it names is there."""

import re
from pathlib import Path

from test_project_text import FILES, calls, tree_of
from test_registry import published

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "trust.md").read_text(encoding="utf-8")
SELF, HEADER, GGUF = "test_trust.py", "test_safetensors_header.py", "test_gguf.py"
SERVER, SUBMIT, LORA = "test_client_server.py", "test_cli_submit.py", "host/test_lora_loss.py"
RESULTS, FLEET, JOURNAL = "test_client_results.py", "test_fleet.py", "test_client_journal.py"
TEXT, CHECKPOINT, KEPT = "test_project_text.py", "test_checkpoint.py", "host/test_kept.py"
UPLOADS, SETTINGS = "test_client_uploads.py", "test_settings.py"

# {who: {what may come from there: (what happens, the test)}}
THREATS = {
    "model files": {
        "a pickle, by content or by suffix": ("refused, never opened", f"{HEADER}::test_bad_file"),
        "a header that lies": (
            "one sentence, as the safetensors library and gguf-py refuse it",
            f"{GGUF}::test_a_damaged_header_is_refused_where_gguf_py_refuses_it",
        ),
        "sizes that nobody has": (
            "read: its header alone",
            f"{HEADER}::test_a_file_of_40_gb_costs_its_header",
        ),
        "an index that leads out of its folder": (
            "refused",
            f"{CHECKPOINT}::test_an_index_that_points_outside_its_folder",
        ),
        "markers and metadata of any JSON": (
            "one sentence, or a format from the future that is not run",
            f"{CHECKPOINT}::test_known_names_with_nonsense_shapes_never_break_the_inspection",
        ),
        "a LoRA's patterns, which are regular expressions": (
            "refused where they repeat too much",
            f"{LORA}::test_metadata_that_tell_no_scale",
        ),
        "names that would steer the terminal": (
            "escaped",
            "test_cli_inspect.py::test_a_name_that_would_steer_the_terminal_is_escaped",
        ),
    },
    "workflows": {
        "any file": (
            "one sentence",
            "test_client_workflow_file.py::test_any_file_is_read_or_refused",
        ),
        "names of nodes and titles": (
            "escaped on the terminal",
            f"{SUBMIT}::test_names_of_nodes_and_folders_cannot_steer_the_terminal",
        ),
        "an image outside the workflow's folder": (
            "uploaded, and said",
            f"{UPLOADS}::test_a_file_outside_the_workflows_folder_that_the_workflow_names_is_said",
        ),
    },
    "images": {
        "a bomb of pixels, any bytes": (
            "refused before it is unpacked",
            f"{UPLOADS}::test_a_camera_may_be_large_and_a_bomb_may_not",
        ),
        "a PNG's texts": (
            "a workflow, or one sentence",
            "test_fuzz.py::test_fixed_cases_of_every_target_are_read_or_refused",
        ),
    },
    "servers": {
        "a name of a file": (
            "never leads out of the output folder",
            f"{RESULTS}::test_a_name_of_the_server_never_leads_out_of_the_folder",
        ),
        "a file without an end": (
            "cut at `--most-gb`",
            "test_client_sick_servers.py::test_a_file_larger_than_the_limit_is_refused",
        ),
        "a redirect": (
            "told, not followed: no password goes elsewhere",
            f"{SERVER}::test_a_redirect_is_not_followed_for_it_would_turn_a_post_into_a_get",
        ),
        "what it says": (
            "escaped on the terminal",
            f"{SERVER}::test_what_a_server_answers_cannot_steer_the_terminal",
        ),
        "messages of any form": (
            "passed over",
            f"{SERVER}::test_messages_of_custom_nodes_are_passed_over",
        ),
        "its password": ("in no message and no file", f"{SERVER}::test_a_password_is_never_shown"),
    },
    "neighbours in a shared cache folder": {
        "a pipe, a file without an end": (
            "not read",
            f"{SETTINGS}::test_a_pipe_or_a_huge_file_in_a_shared_folder_holds_nobody_up",
        ),
        "a measurement of any form": (
            "counts as none",
            "test_calibrate.py::test_a_damaged_file_counts_as_empty_and_is_told_once",
        ),
        "quantized weights that are damaged": (
            "quantized anew",
            f"{KEPT}::test_a_damaged_file_is_quantized_anew",
        ),
    },
    "other users of this machine": {
        "the journal": (
            "0600: it holds prompts",
            f"{JOURNAL}::test_a_file_of_another_size_is_not_done",
        ),
        "servers.json": (
            "0600",
            f"{FLEET}::test_the_files_of_a_fleet_are_its_users_alone_and_its_status_is_true_after_a_kill",
        ),
        "logs of servers": (
            "0600",
            f"{FLEET}::test_a_server_starts_with_a_place_of_its_own_and_stops",
        ),
        "servers of a fleet, which ask for no password": (
            "on 127.0.0.1, or openly if told",
            f"{FLEET}::test_servers_of_a_cluster_of_several_machines_listen_openly_only_if_told",
        ),
    },
    "ourselves": {
        "the network": (
            "only servers that the user names",
            f"{TEXT}::test_only_the_client_uses_the_network",
        ),
        "downloads": ("none", f"{TEXT}::test_nothing_is_downloaded"),
        "unpickling": ("none", f"{TEXT}::test_nothing_is_unpickled"),
        "texts on ComfyUI's page": (
            "as text, never as HTML",
            f"{SELF}::test_the_page_gets_texts_and_no_html",
        ),
        "the registry's scan": (
            "finds nothing",
            "test_registry.py::test_the_scan_finds_nothing_in_what_is_published",
        ),
    },
}
# What runs code by its name: of the package, and in a clone alone where the registry has it not.
RUNS = {
    "__main__.py: importlib": "the package from a folder of any name",
    "cli/__init__.py: importlib": "the command that is asked for, alone",
    "families/registry.py: importlib": "what a family does in the one host that runs",
    "fleet/server.py: subprocess": "starts ComfyUI, and `submit` for a warm-up",
    "fleet/supervisor.py: subprocess": "`nvidia-smi -L` counts the cards",
    "hosts/comfyui/contract.py: importlib": "modules of ComfyUI, whose signatures are compared",
    "hosts/comfyui/qwen_image.py: importlib": "ComfyUI's model code, which an older one has not",
    "machine/card.py: ctypes": "the driver's NVML, for cards and limits",
    "machine/links.py: ctypes": "the driver's CUDA library, for copies from card to card",
    "machine/packages.py: importlib": "an optional package, to say why its import fails",
    "optimizations/attention/backends.py: importlib": "FlashAttention, under one of two names",
    "optimizations/attention/quantized.py: importlib": "SageAttention, an optional package",
}
NEEDS = {
    "isal": "writes PNG files three times as fast; the one package that ComfyUI lacks",
    "torch, transformers, safetensors, numpy, scipy, psutil": "computing, text encoder and "
    "tokenizer, weights, pixels, schedules, free memory; ComfyUI brings them",
    "aiohttp, pillow, tqdm": "`submit`: servers, images and their texts, progress; ComfyUI brings "
    "them",
    "diffusers, accelerate": "`generate` and the reference, without ComfyUI",
    "ray": "`fleet --ray`, on a cluster whose machines trust each other: Ray pickles between them",
}
# {what was wrong: (who lost what, the test that has failed before)}
MENDED = {
    "patterns in a LoRA's metadata that match for years": (
        "who loads such a file: ComfyUI's worker, until it is killed",
        f"{LORA}::test_metadata_that_tell_no_scale",
    ),
    "a LoRA's patterns were compiled for each module anew": (
        "who loads one with a rank for each of 720 modules: 13 s, or 26 with alphas",
        f"{LORA}::test_a_rank_of_its_own_for_each_module_takes_no_time",
    ),
    "a LoRA's matrix that is a number": (
        "its user: Python's error in the place of a sentence",
        f"{LORA}::test_a_down_matrix_that_is_a_number_is_refused",
    ),
    "a LoRA's name of a thousand prefixes, by recursion": (
        "the same",
        "test_lora_names.py::test_a_name_of_many_prefixes_is_normalized",
    ),
    "a VAE's block of a number of 5,000 digits": (
        "the same",
        f"{CHECKPOINT}::test_a_vaes_block_without_a_usable_number_keeps_its_name",
    ),
    "a split GGUF file whose number of parts is none": (
        "the same",
        f"{GGUF}::test_a_set_whose_number_of_parts_is_none_is_refused",
    ),
    "a journal's time that is no number": (
        "who resumes: the run ended where it printed that job",
        f"{JOURNAL}::test_a_time_is_a_number",
    ),
    "a journal's line without an end, of zeros as a crash leaves them": (
        "who resumes: as much memory as the file has bytes",
        f"{JOURNAL}::test_a_line_without_an_end_is_read_in_pieces",
    ),
    "a pipe or an endless file in the cache folder": (
        "every user of the folder: ComfyUI's start, or all memory",
        f"{SETTINGS}::test_a_pipe_or_a_huge_file_in_a_shared_folder_holds_nobody_up",
    ),
    "a measurement of endless tokens": (
        "every user of the folder: each run with that attention",
        f"{SETTINGS}::test_a_measurement_of_endless_tokens_is_none",
    ),
    "a workflow of gigabytes": (
        "who submits: all memory",
        "test_client_workflow_file.py::test_a_file_that_is_far_too_large_is_not_read",
    ),
    "servers.json of endless depth or size": (
        "a run that reads it anew: ended in the middle",
        "test_client_fleet.py::test_a_file_that_lists_no_servers",
    ),
    "a long text where a key of `--set` is meant": (
        "who forgot `prompt=`: minutes, then a page of text",
        "test_client_settings.py::test_a_text_in_the_place_of_a_key_is_refused_at_once",
    ),
    "a long text where an address is meant": (
        "who names the wrong file with --servers: hours",
        f"{SERVER}::test_a_long_text_that_is_no_address_is_cut",
    ),
    "a message of endless depth": (
        "a run: one node pack's message ended its progress",
        f"{SERVER}::test_messages_of_custom_nodes_are_passed_over",
    ),
    "an error's text of endless depth": (
        "a run: one server's answer ended it",
        f"{SERVER}::test_an_answer_that_is_no_json_is_an_error_of_the_server",
    ),
    "what `submit` said of servers and folders": (
        "who reads it: control characters reached the terminal",
        f"{SUBMIT}::test_names_of_nodes_and_folders_cannot_steer_the_terminal",
    ),
    "an address whose brackets hold no IPv6 address": (
        "who submits: Python's error in the place of a sentence",
        f"{SERVER}::test_an_address_that_is_none",
    ),
    "a GGUF file of millions of texts": (
        "who loads or inspects it: seconds for each look",
        "test_gguf.py::test_a_broken_file_is_refused_in_one_sentence",
    ),
}
LEFT = {
    "other node packs": "they run in ComfyUI's process and may do anything",
    "ComfyUI's port": "it has no password: who reaches it runs any workflow",
    "who may write weights, kept ones too": "decides what is painted",
    "a header of 100 MB": "takes its seconds, as the format allows it",
}


def table(head, rows):
    parts = [f"| {head} |", f"|{'---|' * (head.count('|') + 1)}"]
    return "\n".join([*parts, *(f"| {' | '.join(it)} |" for it in rows)])


def test_every_test_that_the_page_names_is_there():
    named = [*MENDED.values(), *(it for each in THREATS.values() for it in each.values())]
    for _, at in named:
        file, test = at.split("::")
        place = ROOT / "tests" / file if "/" in file else ROOT / "tests" / "unit" / file
        assert f"def {test}(" in place.read_text(encoding="utf-8"), at


def test_the_page_is_the_tables():
    threats = [(who, it, *row) for who, each in THREATS.items() for it, row in each.items()]
    counts = f"{len(MENDED)} found and mended, {len(LEFT)} left."
    for made in (
        table("from | what | what happens | test", threats),
        table("where | why", RUNS.items()),
        table("package | for", NEEDS.items()),
        counts,
        table(
            "found and mended | who lost what | test", [(it, *row) for it, row in MENDED.items()]
        ),
        table("left | why", LEFT.items()),
    ):
        assert f"\n{made}\n" in PAGE, f"the page has:\n\n{made}\n"


def test_the_page_counts_a_million_cases():
    """`python -m qwen_l40s.tools.fuzz --write` writes them."""
    source = (ROOT / "tools" / "fuzz" / "targets.py").read_text(encoding="utf-8")
    targets = re.findall(r'^    "(.*?)": Target\(', source, re.MULTILINE)
    (line,) = re.findall(r"^Cases: (.*)\.$", PAGE, re.MULTILINE)
    rows = [it.rpartition(" ") for it in line.split("; ")]
    *each, whole = (int(count.replace(",", "")) for *_, count in rows)
    assert [name for name, *_ in rows] == [*targets, "in all"]
    assert whole == sum(each) >= 1_000_000


def test_what_runs_code_by_name_is_listed_with_its_reason():
    kinds = {
        "importlib": r".*\b(import_module|spec_from_file_location|__import__)",
        "subprocess": r"subprocess\.\w+|os\.(system|popen|exec\w+|spawn\w+)|.*create_subprocess.*",
        "ctypes": r"ctypes\.\w*DLL",
        "eval": r"(torch|np|numpy)\.load|eval|exec|compile|pickle\.loads?|.*\.unsafe_load",
    }
    found = set()
    for file in FILES:
        name = file.relative_to(ROOT).as_posix()
        if name.split("/")[0] in ("bench", "tools"):
            continue
        for call, _ in calls(tree_of(file)):
            found |= {f"{name}: {it}" for it, rule in kinds.items() if re.fullmatch(rule, call)}
    assert found == set(RUNS)
    shipped = {it for it in RUNS if it.split(":")[0] in published()}
    assert not any("subprocess" in it or "eval" in it for it in shipped)


def test_every_dependency_is_named_with_what_it_is_for():
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    lists = r"^(?:dependencies|standalone|client|ray) = \[\n?(.*?)\n?\]$"
    found = "\n".join(re.findall(lists, text, re.MULTILINE | re.DOTALL))
    named = [name for names in NEEDS for name in names.split(", ")]
    assert sorted(set(re.findall(r'"([a-z]+)[><="]', found))) == sorted(named)


def test_the_page_gets_texts_and_no_html():
    for file in (ROOT / "web").rglob("*.js"):
        text = file.read_text(encoding="utf-8")
        html = r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function"
        assert re.findall(html, text) == [], file
