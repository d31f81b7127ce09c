//! Modules of a crate: those that stand beside each other use each other in one direction only. A
//! folder counts as one module for those beside it. A module may use what its own folder's `mod.rs`
//! defines, and that file its modules.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::Path,
};

use anyhow::{Context, Result};

/// A module's path within its crate: `["attach", "ipc"]`; the crate's root has none.
type ModulePath = Vec<String>;

/// Who uses whom among modules that stand beside each other, by their parent.
type ModuleUses = BTreeMap<ModulePath, BTreeMap<String, BTreeSet<String>>>;

/// The groups of modules that use each other in the crate whose sources are in `folder`, as
/// `parent: a, b`.
pub(crate) fn circles(folder: &Path) -> Result<Vec<String>> {
    let mut files = Vec::new();
    list(folder, &mut Vec::new(), &mut files)?;
    let known: BTreeSet<ModulePath> = files.iter().map(|(path, _)| path.clone()).collect();
    let mut uses = ModuleUses::new();
    for (path, text) in &files {
        for used in references(path, &without_tests(text)) {
            let used = longest_known(&used, &known);
            note(path, used, &mut uses);
        }
    }
    let mut found = Vec::new();
    for (parent, edges) in &uses {
        let parent = if parent.is_empty() { "the crate".to_owned() } else { parent.join("::") };
        found.extend(groups(edges).iter().map(|group| format!("{parent}: {}", group.join(", "))));
    }
    Ok(found)
}

fn list(folder: &Path, at: &mut ModulePath, files: &mut Vec<(ModulePath, String)>) -> Result<()> {
    let entries =
        fs::read_dir(folder).with_context(|| format!("{}: cannot be listed", folder.display()))?;
    for entry in entries {
        let path = entry?.path();
        let Some(stem) = path.file_stem().and_then(|stem| stem.to_str()).map(str::to_owned) else {
            continue;
        };
        if path.is_dir() {
            at.push(stem);
            list(&path, at, files)?;
            at.pop();
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            let text = fs::read_to_string(&path)
                .with_context(|| format!("{}: cannot be read", path.display()))?;
            let mut module = at.clone();
            if !["lib", "main", "mod"].contains(&stem.as_str()) {
                module.push(stem);
            }
            files.push((module, text));
        }
    }
    Ok(())
}

/// The code without comments, and without the tests at its end.
fn without_tests(text: &str) -> String {
    let end =
        text.find("\n#[cfg(test)]\nmod ").or_else(|| text.find("\n#[cfg(test)]\npub(crate) mod "));
    let code = &text[..end.unwrap_or(text.len())];
    code.lines().filter(|line| !line.trim_start().starts_with("//")).collect::<Vec<_>>().join("\n")
}

/// The paths that begin with `crate`, `self` or `super`, from the crate's root on.
fn references(module: &ModulePath, code: &str) -> Vec<ModulePath> {
    let mut found = Vec::new();
    let bytes = code.as_bytes();
    for start in ["crate::", "self::", "super::"] {
        for (at, _) in code.match_indices(start) {
            let before = at.checked_sub(1).map(|before| bytes[before]);
            if before.is_some_and(|b| b.is_ascii_alphanumeric() || [b'_', b':', b'$'].contains(&b))
            {
                continue;
            }
            expand(&code[at..], Vec::new(), &mut |path| {
                let mut whole = match path.first().map(String::as_str) {
                    Some("crate") => Vec::new(),
                    _ => module.clone(),
                };
                for part in path {
                    match part.as_str() {
                        "crate" | "self" => {}
                        "super" => drop(whole.pop()),
                        _ => whole.push(part),
                    }
                }
                found.push(whole);
            });
        }
    }
    found
}

/// Calls `each` with every path that `text` begins with: of `a::{b, c::{d}}` with `a::b` and
/// `a::c::d`. Answers the rest.
fn expand<'a>(
    text: &'a str,
    mut so_far: Vec<String>,
    each: &mut dyn FnMut(Vec<String>),
) -> &'a str {
    let mut rest = text.trim_start();
    loop {
        if let Some(mut inner) = rest.strip_prefix('{') {
            loop {
                inner = inner.trim_start();
                if let Some(after) = inner.strip_prefix('}') {
                    return after;
                }
                let after = expand(inner, so_far.clone(), each).trim_start();
                inner = after.strip_prefix(',').unwrap_or(after);
                if inner.len() == text.len()
                    || inner.is_empty()
                    || !inner.starts_with(is_path_or_end)
                {
                    return inner;
                }
            }
        }
        let end = rest.find(|c: char| !c.is_alphanumeric() && c != '_').unwrap_or(rest.len());
        let (name, after) = rest.split_at(end);
        if name.is_empty() {
            let Some(after) = rest.strip_prefix('*') else { return rest };
            each(so_far);
            return after;
        }
        so_far.push(name.to_owned());
        match after.strip_prefix("::") {
            Some(next) => rest = next,
            None => {
                each(so_far);
                // `as other`
                let after = after.trim_start();
                let renamed = after.strip_prefix("as ").map(|of| of.trim_start());
                return renamed.map_or(after, |of| {
                    let end =
                        of.find(|c: char| !c.is_alphanumeric() && c != '_').unwrap_or(of.len());
                    &of[end..]
                });
            }
        }
    }
}

fn is_path_or_end(c: char) -> bool {
    c.is_alphanumeric() || c == '_' || c == '}' || c.is_whitespace()
}

fn longest_known<'a>(path: &'a [String], known: &BTreeSet<ModulePath>) -> &'a [String] {
    let lengths = (0..=path.len()).rev();
    lengths.map(|length| &path[..length]).find(|prefix| known.contains(*prefix)).unwrap_or(&[])
}

/// Notes that `module` uses `used`, where they part ways.
fn note(module: &[String], used: &[String], uses: &mut ModuleUses) {
    let common = module.iter().zip(used).take_while(|(a, b)| a == b).count();
    if let (Some(from), Some(to)) = (module.get(common), used.get(common)) {
        uses.entry(module[..common].to_vec())
            .or_default()
            .entry(from.clone())
            .or_default()
            .insert(to.clone());
    }
}

/// All that `from` uses, directly or by what it uses.
fn reached<'a>(from: &'a str, edges: &'a BTreeMap<String, BTreeSet<String>>) -> BTreeSet<&'a str> {
    let (mut reached, mut next) = (BTreeSet::new(), vec![from]);
    while let Some(at) = next.pop() {
        for used in edges.get(at).into_iter().flatten() {
            if reached.insert(used.as_str()) {
                next.push(used);
            }
        }
    }
    reached
}

/// The groups of modules of which each uses each other one, directly or not.
fn groups(edges: &BTreeMap<String, BTreeSet<String>>) -> BTreeSet<Vec<&str>> {
    let all: BTreeMap<&str, BTreeSet<&str>> =
        edges.keys().map(|from| (from.as_str(), reached(from, edges))).collect();
    let group = |from: &str| {
        let back = |to: &&str| all.get(to).is_some_and(|of| of.contains(from));
        all.get(from).into_iter().flatten().copied().filter(back).collect::<Vec<&str>>()
    };
    all.keys().map(|from| group(from)).filter(|group| group.len() > 1).collect()
}

#[cfg(test)]
mod tests {
    use super::{expand, groups, references};
    use std::collections::{BTreeMap, BTreeSet};

    #[test]
    fn paths_of_groups_are_taken_apart() {
        let mut found = Vec::new();
        expand("crate::{a::B, c::{D as E, f::*}, self};", Vec::new(), &mut |path| {
            found.push(path.join("::"))
        });
        assert_eq!(found, ["crate::a::B", "crate::c::D", "crate::c::f", "crate::self"]);
    }

    #[test]
    fn a_path_is_counted_from_the_crates_root() {
        let module = ["attach".to_owned(), "ipc".to_owned()].to_vec();
        let found = references(
            &module,
            "use super::place::{self, Unfit}; x(crate::types::Type); other_crate::y()",
        );
        let found: Vec<String> = found.iter().map(|path| path.join("::")).collect();
        assert_eq!(found, ["types::Type", "attach::place", "attach::place::Unfit"]);
    }

    #[test]
    fn every_group_is_found_and_nothing_that_only_leads_to_one() {
        let edges = |list: &[(&str, &str)]| {
            let mut edges: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
            for (from, to) in list {
                edges.entry((*from).to_owned()).or_default().insert((*to).to_owned());
            }
            edges
        };
        assert!(groups(&edges(&[("a", "b"), ("a", "c"), ("b", "c")])).is_empty());
        let two = edges(&[("a", "b"), ("b", "c"), ("c", "b"), ("d", "e"), ("e", "f"), ("f", "d")]);
        assert_eq!(groups(&two), [vec!["b", "c"], vec!["d", "e", "f"]].into());
    }
}
