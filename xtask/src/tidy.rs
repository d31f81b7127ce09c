//! `cargo xtask tidy`: rules of this project that no compiler checks. Each broken one is a line
//! `file:line: what, and what to do`.

use std::{
    collections::HashSet,
    env, fs,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result, bail};
use serde_json::Value;

use crate::{
    documents,
    exec::{StepLog, cargo, output, write_if_changed},
    modules,
    paths::WorkspacePaths,
};

/// The members in the order of the data. Each may depend on those above it, and on nothing below.
/// `system-tests` may use any; `xtask` only what needs nothing else, for it must build before
/// setup.
const ORDER: [&str; 21] = [
    "ebpf-common",
    "profiler-protocol",
    "ebpf-probes",
    "profiler-shim",
    "xtask",
    "perfusion-model",
    "perfusion-unwind",
    "perfusion-host",
    "perfusion-artefacts",
    "perfusion-sources",
    "perfusion-symbolize",
    "perfusion-aggregate",
    "perfusion-pprof",
    "perfusion-dotnet",
    "perfusion-heap",
    "perfusion-recorder",
    "perfusion-export",
    "perfusion-report",
    "perfusion",
    "fuzz",
    "system-tests",
];

/// What those that run elsewhere may depend on, and what is built before there is a toolchain.
const ALONE: [(&str, &[&str]); 3] = [
    ("ebpf-probes", &["ebpf-common"]),
    ("profiler-shim", &["profiler-protocol"]),
    ("xtask", &["ebpf-common"]),
];

/// Files and folders where `unsafe` may be written: the kernel's, the CLR's and the allocator's
/// interfaces, and memory shared with others.
const UNSAFE_ALLOWED: [&str; 13] = [
    "ebpf-probes/src/",
    "ebpf-common/src/",
    "profiler-shim/src/com/",
    "profiler-shim/src/region.rs",
    "profiler-shim/src/runtime/",
    "profiler-shim/src/freestanding/",
    "profiler-shim/src/machine/",
    "profiler-shim/src/syscall.rs",
    "profiler-shim/src/vdso.rs",
    "crates/sources/src/kernel/perf.rs",
    "crates/sources/src/kernel/maps.rs",
    "crates/recorder/src/trim.rs",
    "crates/host/src/io_priority.rs",
];

/// This file, which names what it refuses.
const THIS: &str = "xtask/src/tidy.rs";

/// A module of these names says nothing about what lives in it.
const EMPTY_NAMES: [&str; 3] = ["utils", "helpers", "common"];

/// Names of types and modules that the field has other terms for.
const OWN_WORDS: [(&str, &str); 12] = [
    ("patience", "guarded I/O, timeout"),
    ("lesson", "rule update"),
    ("finisher", "user-space unwinder"),
    ("coin", "sampler"),
    ("shelf", "exact table"),
    ("lane", "sink worker"),
    ("outlet", "non-blocking writer"),
    ("confines", "cgroup limits"),
    ("wishes", "subscriptions"),
    ("pulse", "heartbeat"),
    ("effort", "cost attribution"),
    ("neighbour", "process priority"),
];

/// Words of our own that mean nothing else here. No name has one as a part, no text of the program
/// and no metric.
const OWN_PARTS: [(&str, &str); 14] = [
    ("patience", "timeout"),
    ("lesson", "rule update"),
    ("lessons", "rule updates, pushed rules"),
    ("teach", "push rules"),
    ("taught", "pushed"),
    ("learnt", "known, cached"),
    ("finisher", "user-space unwinder"),
    ("coin", "sampler"),
    ("thin", "downsample"),
    ("thinned", "downsampled"),
    ("thinning", "downsampling"),
    ("sleepers", "off-CPU threads"),
    ("wish", "subscription"),
    ("wishes", "subscriptions"),
];

/// Most columns of a line of comment; a table's row has no other place.
const COMMENT_COLUMNS: usize = 100;

/// Files that choose a compiler, and what stands before its version there. It is `rust-version`:
/// what is promised is what CI builds with.
const COMPILERS: [(&str, &str); 2] =
    [(".github/workflows/ci.yml", "toolchain: \""), ("Dockerfile", "--default-toolchain ")];

/// Lists of counters, what they count, and what the names of their metrics begin with.
const COUNTER_LISTS: [(&str, &str, &str); 7] = [
    ("ebpf-common/src/counter.rs", "eBPF probes and their reader", ""),
    ("profiler-protocol/src/counter.rs", "Shim", ""),
    ("crates/sources/src/shim/counters.rs", "The daemon's reader of the shims", ""),
    ("crates/recorder/src/counters.rs", "The stages inside the daemon", ""),
    ("daemon/src/counts.rs", "`perfusion daemon`", ""),
    ("crates/export/src/counts.rs", "Sinks: by the label `sink`", "sink_"),
    ("daemon/src/daemon/families.rs", "The daemon as a whole: in metrics only", ""),
];

/// Counts of what is in a cache now, which may fall (`daemon/src/daemon/families.rs`).
const GAUGES: &str = "symbolize_";

/// Folders of the root directory that are the same on every machine; another one there is
/// somebody's own.
const STANDARD_FOLDERS: [&str; 17] = [
    "bin", "boot", "dev", "etc", "lib", "lib64", "media", "mnt", "opt", "proc", "run", "sbin",
    "srv", "sys", "tmp", "usr", "var",
];

/// Checks all rules; with `fix` documents that are written from code are written anew.
pub(crate) fn tidy(paths: &WorkspacePaths, steps: &StepLog, fix: bool) -> Result<()> {
    steps.step("tidy");
    let mut broken = Vec::new();
    check_edges(paths, &mut broken)?;
    check_dependency_reasons(paths, &mut broken)?;
    check_compilers(paths, steps, &mut broken)?;

    let machine_paths = machine_paths(paths);
    let (mut files, mut functions) = (Vec::new(), HashSet::new());
    list(&paths.root, &paths.root, &mut files)?;
    for file in &files {
        let Ok(text) = fs::read_to_string(paths.root.join(file)) else {
            continue; // not text
        };
        let name = file.to_string_lossy();
        check_machine_paths(&name, &text, &machine_paths, &mut broken);
        if file.extension().is_some_and(|extension| extension == "rs") {
            check_rust(&name, &text, &mut broken);
            functions.extend(text.lines().filter_map(function));
        }
    }
    check_named_tests(paths, &functions, &mut broken)?;
    check_counters(paths, fix, &mut broken)?;
    documents::check(paths, &files, &mut broken);

    if !broken.is_empty() {
        bail!("tidy: {} broken rule(s)\n{}", broken.len(), broken.join("\n"));
    }
    Ok(())
}

/// Name of the function that a line begins.
fn function(line: &str) -> Option<String> {
    let line = line.trim_start();
    let line = line.strip_prefix("pub(crate) ").unwrap_or(line).strip_prefix("fn ")?;
    Some(line.split_once(['(', '<'])?.0.to_owned())
}

/// The tests that docs/reliability.md names are there: those in its fourth column, and each
/// `module::test`.
fn check_named_tests(
    paths: &WorkspacePaths,
    functions: &HashSet<String>,
    broken: &mut Vec<String>,
) -> Result<()> {
    let path = paths.root.join("docs/reliability.md");
    let text =
        fs::read_to_string(&path).with_context(|| format!("{}: cannot be read", path.display()))?;
    for (number, line) in numbered(&text) {
        let shown_by = code_spans(line.split('|').nth(4).unwrap_or_default());
        let in_modules = code_spans(line).filter_map(|span| Some(span.rsplit_once("::")?.1));
        for name in shown_by.chain(in_modules).filter(|name| !functions.contains(*name)) {
            broken.push(format!("docs/reliability.md:{number}: there is no test `{name}`"));
        }
    }
    Ok(())
}

/// What stands between backticks.
fn code_spans(text: &str) -> impl Iterator<Item = &str> {
    text.split('`').skip(1).step_by(2)
}

fn check_edges(paths: &WorkspacePaths, broken: &mut Vec<String>) -> Result<()> {
    let text = output(cargo(paths).args(["metadata", "--no-deps", "--format-version", "1"]))?;
    let metadata: Value = serde_json::from_str(&text).context("output of `cargo metadata`")?;
    for package in metadata["packages"].as_array().into_iter().flatten() {
        let name = package["name"].as_str().unwrap_or_default();
        let Some(place) = ORDER.iter().position(|member| *member == name) else {
            broken.push(format!(
                "{name}: unknown member; give it its place in ORDER, xtask/src/tidy.rs"
            ));
            continue;
        };
        let alone = ALONE.iter().find(|(member, _)| *member == name).map(|(_, allowed)| *allowed);
        let allowed = alone.unwrap_or_else(|| ORDER.get(..place).unwrap_or_default());
        for dependency in package["dependencies"].as_array().into_iter().flatten() {
            let other = dependency["name"].as_str().unwrap_or_default();
            if !dependency["path"].is_null() && !allowed.contains(&other) {
                broken.push(format!(
                    "{name} depends on {other}, which does not stand above it: see \
                     xtask/src/tidy.rs"
                ));
            }
        }
        if let Some(manifest) = package["manifest_path"].as_str() {
            let circles = modules::circles(&Path::new(manifest).with_file_name("src"))?;
            broken.extend(
                circles.iter().map(|circle| format!("{name}: modules use each other: {circle}")),
            );
        }
    }
    Ok(())
}

/// Every dependency is justified in its line.
fn check_dependency_reasons(paths: &WorkspacePaths, broken: &mut Vec<String>) -> Result<()> {
    let manifest = paths.root.join("Cargo.toml");
    let text = fs::read_to_string(&manifest)
        .with_context(|| format!("{}: cannot be read", manifest.display()))?;
    let mut inside = false;
    for (number, line) in numbered(&text) {
        if line.starts_with('[') {
            inside = line == "[workspace.dependencies]";
        } else if inside && line.contains('=') && !line.contains("path =") && !line.contains('#') {
            broken.push(format!(
                "Cargo.toml:{number}: a dependency without its reason; add it as a comment in the \
                 line"
            ));
        }
    }
    Ok(())
}

/// Machines build with the compiler that `rust-version` names. On one that has a newer one this is
/// said: cargo refuses older ones, and clippy what newer ones alone have.
fn check_compilers(
    paths: &WorkspacePaths,
    steps: &StepLog,
    broken: &mut Vec<String>,
) -> Result<()> {
    let read = |file: &str| {
        fs::read_to_string(paths.root.join(file)).with_context(|| format!("{file}: cannot be read"))
    };
    let manifest = read("Cargo.toml")?;
    let promised =
        version_behind(&manifest, "rust-version = \"").context("Cargo.toml: no rust-version")?;
    for (file, before) in COMPILERS {
        let text = read(file)?;
        if version_behind(&text, before) != Some(promised) {
            broken.push(format!(
                "{file}: expected the compiler that rust-version in Cargo.toml names, {promised}"
            ));
        }
    }
    let compiler = output(Command::new("rustc").arg("--version"))?;
    let found = version_behind(&compiler, "rustc ").context("`rustc --version`: no version")?;
    if found != promised && !found.starts_with(&format!("{promised}.")) {
        steps.step(&format!(
            "rustc here is {found}; rust-version, which CI builds with, {promised}"
        ));
    }
    Ok(())
}

/// The number that stands behind the first such text.
fn version_behind<'a>(text: &'a str, before: &str) -> Option<&'a str> {
    let (_, behind) = text.split_once(before)?;
    let end = behind.find(|letter: char| !letter.is_ascii_digit() && letter != '.');
    behind.get(..end.unwrap_or(behind.len())).filter(|version| !version.is_empty())
}

/// All files of the checkout but those that git ignores or that belong to git.
fn list(root: &Path, folder: &Path, files: &mut Vec<PathBuf>) -> Result<()> {
    for entry in
        fs::read_dir(folder).with_context(|| format!("{}: cannot be listed", folder.display()))?
    {
        let entry = entry.with_context(|| format!("{}: cannot be listed", folder.display()))?;
        let path = entry.path();
        let name = entry.file_name();
        if name == ".git" || name == "target" {
            continue;
        }
        let kind = entry.file_type().with_context(|| format!("{}: its kind", path.display()))?;
        if kind.is_dir() {
            list(root, &path, files)?;
        } else if kind.is_file() {
            files.push(path.strip_prefix(root).unwrap_or(&path).to_path_buf());
        }
    }
    Ok(())
}

/// Beginnings of paths that exist on this machine only.
fn machine_paths(paths: &WorkspacePaths) -> Vec<String> {
    let mut found = vec!["/home/".to_owned(), "/Users/".to_owned()];
    if let Some(home) = env::var_os("HOME") {
        found.push(format!("{}/", home.to_string_lossy()));
    }
    let top = paths
        .root
        .components()
        .nth(1)
        .map(|part| part.as_os_str().to_string_lossy().into_owned())
        .unwrap_or_default();
    if !STANDARD_FOLDERS.contains(&top.as_str()) {
        found.push(format!("/{top}/"));
    }
    found.push(format!("{}/", paths.root.display()));
    found
}

fn check_machine_paths(name: &str, text: &str, machine_paths: &[String], broken: &mut Vec<String>) {
    if name == THIS {
        return; // it names them to find them
    }
    for (number, line) in numbered(text) {
        for path in machine_paths {
            // "daemon/src/" is no path below /src/: a path begins where no path goes on.
            let starts = line.match_indices(path.as_str()).any(|(at, _)| {
                !line.get(..at).unwrap_or_default().ends_with(|before: char| {
                    before.is_alphanumeric() || "._-/*}$".contains(before)
                })
            });
            if starts {
                broken.push(format!(
                    "{name}:{number}: {path}: a path of somebody's machine; make \
                     it relative or take it from the environment"
                ));
            }
        }
    }
}

fn check_rust(name: &str, text: &str, broken: &mut Vec<String>) {
    if !text.starts_with("//!") {
        broken.push(format!("{name}:1: expected `//!`: say in one line what lives in this file"));
    }
    let path = Path::new(name);
    let stem = path.file_stem().map(|stem| stem.to_string_lossy().into_owned()).unwrap_or_default();
    if EMPTY_NAMES.contains(&stem.as_str()) {
        broken.push(format!(
            "{name}: a module called `{stem}` says nothing; name it after what it does"
        ));
    }
    let may_be_unsafe = UNSAFE_ALLOWED.iter().any(|allowed| name.starts_with(allowed));
    for (number, line) in numbered(text) {
        let code = without_comment_and_strings(line);
        for (own, term) in own_parts(&without_comment(line)).filter(|_| name != THIS) {
            broken.push(format!("{name}:{number}: `{own}` is a word of our own; say {term}"));
        }
        if !may_be_unsafe && words(&code).any(|word| word == "unsafe") {
            broken.push(format!(
                "{name}:{number}: `unsafe` is not allowed here; xtask/src/tidy.rs lists where it \
                 is"
            ));
        }
        let is_comment = line.trim_start().starts_with("//");
        if is_comment && line.chars().count() > COMMENT_COLUMNS && !line.contains('|') {
            broken.push(format!(
                "{name}:{number}: a comment of more than {COMMENT_COLUMNS} columns; wrap it"
            ));
        }
        if let Some((own, term)) = defined(&code).and_then(own_word) {
            broken.push(format!("{name}:{number}: `{own}` is a word of our own; say {term}"));
        }
        let reexport = code.trim_start().starts_with("pub use ")
            || code.trim_start().starts_with("pub(crate) use ");
        if reexport && code.contains("::*") {
            broken.push(format!(
                "{name}:{number}: a re-export of everything hides where names come from; list them"
            ));
        }
    }
}

/// The name of the type or module that a line defines.
fn defined(code: &str) -> Option<&str> {
    let mut words = words(code).filter(|word| !["", "pub", "crate", "super"].contains(word));
    let keyword = words.next()?;
    ["struct", "enum", "trait", "type", "mod"].contains(&keyword).then(|| words.next())?
}

/// A word of our own that a name is, and the field's term for it.
fn own_word(name: &str) -> Option<(&'static str, &'static str)> {
    OWN_WORDS.into_iter().find(|(own, _)| name.eq_ignore_ascii_case(own))
}

/// Words of our own that are parts of names or texts in a line.
fn own_parts(code: &str) -> impl Iterator<Item = (&'static str, &'static str)> {
    let parts = words(code).flat_map(|word| word.split('_')).flat_map(humps);
    parts.filter_map(|part| OWN_PARTS.into_iter().find(|(own, _)| part.eq_ignore_ascii_case(own)))
}

/// `RulesPushed` → `Rules`, `Pushed`.
fn humps(word: &str) -> impl Iterator<Item = &str> {
    let is_all_large = !word.chars().any(char::is_lowercase);
    let mut rest = word;
    std::iter::from_fn(move || {
        if rest.is_empty() {
            return None;
        }
        let begins = |(at, letter): (usize, char)| (at > 0 && letter.is_uppercase()).then_some(at);
        let end = if is_all_large { None } else { rest.char_indices().find_map(begins) };
        let (hump, after) = rest.split_at(end.unwrap_or(rest.len()));
        rest = after;
        Some(hump)
    })
}

/// docs/metrics.md is written from the lists of counters, so that none can be missing or say
/// something else.
fn check_counters(paths: &WorkspacePaths, fix: bool, broken: &mut Vec<String>) -> Result<()> {
    let mut text = String::from(
        "# Counters\n\nWritten by `cargo xtask tidy --fix` from the lists in the code. Every loss \
         has its counter; a profile has all of them in its \
         comments that are not 0, by their names, and so has `/debug/pipeline`. `/metrics` has \
         them all, with type and meaning (HELP): what ends with `_total` only \
         grows, until the daemon begins a new recording or ends; the rest may fall.\n",
    );
    for (list, what, prefix) in COUNTER_LISTS {
        let path = paths.root.join(list);
        let source = fs::read_to_string(&path)
            .with_context(|| format!("{}: cannot be read", path.display()))?;
        text.push_str(&format!(
            "\n## {what}\n`{list}`\n\n| name | in `/metrics` | meaning |\n|---|---|---|\n"
        ));
        for ListedCounter { name, help, suffix } in counters(&source) {
            text.push_str(&format!("| `{name}` | `perfusion_{prefix}{name}{suffix}` | {help} |\n"));
        }
    }
    let document = paths.root.join("docs/metrics.md");
    if fix {
        write_if_changed(&document, text.as_bytes())?;
    } else if !fs::read_to_string(&document).is_ok_and(|found| found == text) {
        broken.push(
            "docs/metrics.md: differs from the lists of counters; run `cargo xtask tidy --fix`"
                .to_owned(),
        );
    }
    Ok(())
}

/// One counter of a list.
#[derive(Debug, PartialEq)]
struct ListedCounter {
    name: String,
    help: String,
    /// What its name in `/metrics` ends with, which its type says.
    suffix: &'static str,
}

/// The counters of a list: `Variant "name" "help";`, or `Variant = 1, "name";` below its help as a
/// doc comment. `Gauge` and `Info` before the variant are types; without one it is a counter. Long
/// strings are continued with `\` at the end of a line.
fn counters(list: &str) -> Vec<ListedCounter> {
    let mut found = Vec::new();
    let mut comment = String::new();
    let mut pieces = list.split("\\\n");
    let first = pieces.next().unwrap_or_default().to_owned();
    let list = pieces.fold(first, |joined, piece| joined + piece.trim_start());
    for line in list.lines().map(str::trim) {
        if let Some(text) = line.strip_prefix("///") {
            comment.push_str(text);
            continue;
        }
        let strings: Vec<&str> = line.split('"').skip(1).step_by(2).collect();
        let (name, help) = match strings.as_slice() {
            [name, help] => (*name, *help),
            [name] => (*name, comment.trim()),
            _ => ("", ""),
        };
        if !name.is_empty() && line.ends_with("\";") && !line.starts_with("const ") {
            let suffix = match line.split_once(' ') {
                Some(("Gauge", _)) => "",
                Some(("Info", _)) => "_info",
                _ if name.starts_with(GAUGES) => "",
                _ => "_total",
            };
            found.push(ListedCounter { name: name.to_owned(), help: help.to_owned(), suffix });
        }
        comment.clear();
    }
    found
}

fn numbered(text: &str) -> impl Iterator<Item = (usize, &str)> {
    text.lines().enumerate().map(|(index, line)| (index + 1, line))
}

fn words(code: &str) -> impl Iterator<Item = &str> {
    code.split(|letter: char| !letter.is_alphanumeric() && letter != '_')
}

/// A line's code. A string over several lines is taken for code, which errs to the safe side.
fn without_comment_and_strings(line: &str) -> String {
    code_and_strings(line).filter(|(_, inside)| !inside).map(|(letter, _)| letter).collect()
}

/// A line's code and what is in its strings.
fn without_comment(line: &str) -> String {
    let mut before = false;
    let mut text = String::new();
    for (letter, inside) in code_and_strings(line) {
        if inside != std::mem::replace(&mut before, inside) {
            text.push(' ');
        }
        text.push(letter);
    }
    text
}

/// The letters of a line up to a comment, each with whether it is in a string. What a backslash
/// stands before there, and the quotes, are left out.
fn code_and_strings(line: &str) -> impl Iterator<Item = (char, bool)> {
    let mut inside = false;
    let mut letters = line.chars().peekable();
    std::iter::from_fn(move || {
        loop {
            match letters.next()? {
                '\\' if inside => {
                    letters.next();
                }
                '"' => inside = !inside,
                '/' if !inside && letters.peek() == Some(&'/') => return None,
                letter => return Some((letter, inside)),
            }
        }
    })
}

#[cfg(test)]
mod tests {
    use super::{
        ListedCounter, check_machine_paths, check_rust, counters, version_behind,
        without_comment_and_strings,
    };

    fn rust(name: &str, text: &str) -> Vec<String> {
        let mut broken = Vec::new();
        check_rust(name, text, &mut broken);
        broken
    }

    #[test]
    fn unsafe_is_found_in_code_only() {
        assert_eq!(rust("daemon/src/run.rs", "//! x\nlet a = unsafe { b() };").len(), 1);
        assert_eq!(
            rust(
                "daemon/src/run.rs",
                "//! x\nlet a = \"unsafe\"; // unsafe\n#![deny(unsafe_code)]"
            )
            .len(),
            0
        );
        assert_eq!(
            rust("crates/sources/src/kernel/perf.rs", "//! x\nlet a = unsafe { b() };").len(),
            0
        );
        assert_eq!(without_comment_and_strings(r#"a("\"//", b) // c"#), "a(, b) ");
    }

    #[test]
    fn our_own_words_are_found_in_names_and_texts_and_not_in_comments_or_other_words() {
        for line in [
            "let lessons = 1;",
            "fn take_lesson() {}",
            "Counter::WaitsThinned",
            "const PATIENCE_NS: u64 = 1;",
            "\"shim_objects_thinned\" \"help\";",
            "warn!(\"the coin has {x}\");",
        ] {
            assert_eq!(rust("a.rs", &format!("//! x\n{line}")).len(), 1, "{line}");
        }
        for line in
            ["// the coin", "let coinage = within(thing);", "let a = \"no such\"; // wishes"]
        {
            assert_eq!(rust("a.rs", &format!("//! x\n{line}")), [""; 0], "{line}");
        }
    }

    #[test]
    fn files_say_what_they_are_and_reexport_by_name() {
        assert_eq!(rust("daemon/src/utils.rs", "use a::b;\npub use c::*;").len(), 3);
    }

    #[test]
    fn counters_of_both_forms_and_all_types_are_read() {
        let list = "/// An enum.\nenum A \
             {\nFull \"full\" \"no room\";\n/// Two\n/// lines.\nLost = 1, \"lost\";\n\
             Gauge ROOM \"room\" \"what is \\\n        left\";\nconst A: &str = \"a\";\n\
             \"symbolize_x\" \"y\";\nInfo BUILD \"build\" \"what\";\n";
        let expected = [
            ("full", "no room", "_total"),
            ("lost", "Two lines.", "_total"),
            ("room", "what is left", ""),
            ("symbolize_x", "y", ""),
            ("build", "what", "_info"),
        ];
        let expected = expected.map(|(name, help, suffix)| ListedCounter {
            name: name.into(),
            help: help.into(),
            suffix,
        });
        assert_eq!(counters(list), expected);
    }

    #[test]
    fn versions_end_where_no_number_goes_on() {
        assert_eq!(version_behind("rustc 1.95.0 (59807616e)", "rustc "), Some("1.95.0"));
        assert_eq!(version_behind("with: { toolchain: \"1.95\" }", "toolchain: \""), Some("1.95"));
        assert_eq!(version_behind("--default-toolchain stable", "--default-toolchain "), None);
    }

    #[test]
    fn paths_of_a_machine_are_found_where_they_begin() {
        let mut broken = Vec::new();
        let machine = ["/src/".to_owned()];
        check_machine_paths("a.md", "see daemon/src/main.rs and ./src/a", &machine, &mut broken);
        assert!(broken.is_empty(), "{broken:?}");
        check_machine_paths("a.md", "see `/src/perfusion`", &machine, &mut broken);
        assert_eq!(broken.len(), 1);
    }
}
