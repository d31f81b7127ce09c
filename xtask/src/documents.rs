//! Rules of the documents: links resolve, the book has every page, the README is short, and few
//! sentences are long.

use std::{
    collections::{HashMap, HashSet},
    fs,
    path::{Component, Path, PathBuf},
};

use crate::paths::WorkspacePaths;

/// A sentence with more words is long.
const LONG: usize = 25;

/// One sentence in so many may be long.
const SHARE: usize = 20;

const README_LINES: usize = 90;
const README_BYTES: usize = 6 * 1024;

/// Checks the documents among `files`, which are relative to the root.
pub(crate) fn check(paths: &WorkspacePaths, files: &[PathBuf], broken: &mut Vec<String>) {
    let mut pages = HashMap::new();
    for file in
        files.iter().filter(|file| file.extension().is_some_and(|extension| extension == "md"))
    {
        if let Ok(text) = fs::read_to_string(paths.root.join(file)) {
            pages.insert(file.clone(), text);
        }
    }
    let anchors: HashMap<&Path, HashSet<String>> =
        pages.iter().map(|(file, text)| (file.as_path(), anchors(text))).collect();
    let mut names: Vec<&PathBuf> = pages.keys().collect();
    names.sort_unstable();

    let (mut all, mut long) = (0, 0);
    for file in names {
        let text = pages.get(file).map(String::as_str).unwrap_or_default();
        let name = file.display();
        for (line, link) in links(text) {
            let (target, anchor) = link.split_once('#').unwrap_or((&link, ""));
            let target = if target.is_empty() {
                file.clone()
            } else {
                normal(&file.parent().unwrap_or(Path::new("")).join(target))
            };
            if !paths.root.join(&target).exists() {
                broken.push(format!("{name}:{line}: the link `{link}` leads nowhere"));
            } else if file.starts_with("docs") && !target.starts_with("docs") {
                broken.push(format!("{name}:{line}: the link `{link}` leads out of the book"));
            } else if !anchor.is_empty()
                && anchors.get(target.as_path()).is_some_and(|known| !known.contains(anchor))
            {
                broken.push(format!(
                    "{name}:{line}: the link `{link}` names a heading that is not there"
                ));
            }
        }
        if file.starts_with("docs") || file == Path::new("README.md") {
            let lengths = sentences(text);
            all += lengths.len();
            long += lengths.iter().filter(|words| **words > LONG).count();
        }
    }
    if long * SHARE > all {
        broken.push(format!(
            "README.md and docs: {long} of {all} sentences have more than {LONG} \
             words; at most one in {SHARE} may"
        ));
    }
    check_book(&pages, broken);
    check_readme(&pages, broken);
}

/// Every page below docs is in the table of contents.
fn check_book(pages: &HashMap<PathBuf, String>, broken: &mut Vec<String>) {
    let contents = Path::new("docs/SUMMARY.md");
    let listed: HashSet<PathBuf> = pages
        .get(contents)
        .map(|text| links(text).into_iter().map(|(_, link)| Path::new("docs").join(link)).collect())
        .unwrap_or_default();
    for page in pages.keys().filter(|page| page.starts_with("docs") && *page != contents) {
        if !listed.contains(page) {
            broken.push(format!("{}: is not in docs/SUMMARY.md", page.display()));
        }
    }
}

fn check_readme(pages: &HashMap<PathBuf, String>, broken: &mut Vec<String>) {
    let text = pages.get(Path::new("README.md")).map(String::as_str).unwrap_or_default();
    let lines = text.lines().count();
    if lines > README_LINES || text.len() > README_BYTES {
        broken.push(format!(
            "README.md: {lines} lines and {} bytes; at most {README_LINES} and {README_BYTES}",
            text.len()
        ));
    }
}

/// `path` without `.` and `..`, as the file system is not asked.
fn normal(path: &Path) -> PathBuf {
    let mut normal = PathBuf::new();
    for part in path.components() {
        match part {
            Component::ParentDir => {
                normal.pop();
            }
            Component::CurDir => {}
            _ => normal.push(part),
        }
    }
    normal
}

/// The lines of a document that are not in a block of code, numbered from 1.
fn prose(text: &str) -> impl Iterator<Item = (usize, &str)> {
    let mut code = false;
    text.lines().enumerate().filter_map(move |(index, line)| {
        let fence = line.trim_start().starts_with("```");
        code ^= fence;
        (!code && !fence).then_some((index + 1, line))
    })
}

/// A line without what stands between backticks; `code` stands for each of these.
fn without_code(line: &str, code: &str) -> String {
    line.split('`')
        .enumerate()
        .map(|(index, part)| if index % 2 == 0 { part } else { code })
        .collect()
}

/// Links into the repository, with their lines.
fn links(text: &str) -> Vec<(usize, String)> {
    let mut found = Vec::new();
    for (number, line) in prose(text) {
        let line = without_code(line, "");
        for part in line.split("](").skip(1) {
            let link = part.split(')').next().unwrap_or_default();
            if !link.contains("://") {
                found.push((number, link.to_owned()));
            }
        }
    }
    found
}

/// What links call the headings of a document.
fn anchors(text: &str) -> HashSet<String> {
    let headings = prose(text).filter(|(_, line)| line.starts_with('#'));
    headings
        .map(|(_, line)| {
            let heading = line.trim_start_matches('#').trim().to_lowercase();
            let kept = heading.chars().filter(|c| c.is_alphanumeric() || "_- ".contains(*c));
            kept.map(|c| if c == ' ' { '-' } else { c }).collect()
        })
        .collect()
}

/// Words of each sentence. Tables, headings and code are none; a piece of code in a sentence is one
/// word.
fn sentences(text: &str) -> Vec<usize> {
    let mut paragraphs = vec![String::new()];
    let mut last = 0;
    for (number, line) in prose(text) {
        let trimmed = line.trim_start();
        let item = ["- ", "* "].iter().find_map(|bullet| trimmed.strip_prefix(bullet));
        let numbered = trimmed.split_once(". ").filter(|(number, _)| number.parse::<u32>().is_ok());
        let item = item.or(numbered.map(|(_, rest)| rest));
        let is_prose = !line.trim().is_empty() && !line.starts_with(['|', '#', '<']);
        if !is_prose || item.is_some() || number > last + 1 {
            paragraphs.push(String::new());
        }
        last = number;
        if is_prose && let Some(paragraph) = paragraphs.last_mut() {
            paragraph.push_str(item.unwrap_or(trimmed));
            paragraph.push(' ');
        }
    }
    paragraphs.iter().flat_map(|paragraph| lengths(&without_code(paragraph, "code"))).collect()
}

/// Words of each sentence of a paragraph without code.
fn lengths(paragraph: &str) -> Vec<usize> {
    let mut found = vec![0];
    // The address of a link is no word.
    let text: String =
        paragraph
            .split("](")
            .enumerate()
            .map(|(index, part)| {
                if index == 0 { part } else { part.split_once(')').map_or(part, |(_, rest)| rest) }
            })
            .collect();
    for word in text.split_whitespace() {
        if let Some(words) = found.last_mut()
            && word.chars().any(char::is_alphanumeric)
        {
            *words += 1;
        }
        if word.trim_end_matches([')', '"', '*', '_']).ends_with(['.', '!', '?']) {
            found.push(0);
        }
    }
    found.retain(|words| *words > 0);
    found
}

#[cfg(test)]
mod tests {
    use super::{anchors, links, normal, sentences};
    use std::path::Path;

    #[test]
    fn links_of_text_are_found_and_those_of_code_are_not() {
        let text = "a [b](c.md#d) and [e](https://f)\n```\n[g](h)\n```\n`[i](j)` [k](../l.md)";
        assert_eq!(links(text), [(1, "c.md#d".to_owned()), (5, "../l.md".to_owned())]);
        assert_eq!(normal(Path::new("docs/adr/../a.md")), Path::new("docs/a.md"));
    }

    #[test]
    fn headings_have_the_names_that_links_use() {
        let names = anchors("# What `x` is\n```\n# no heading\n```\n## .NET 10: by chance");
        assert_eq!(names, ["what-x-is", "net-10-by-chance"].map(str::to_owned).into());
    }

    #[test]
    fn words_of_sentences_are_counted_without_tables_and_code() {
        let text = "# Heading here\nOne two `a b c` four. Five\nsix ([seven](x.md))!\n\n| no | \
             word |\n- eight nine\n- ten\n```\ncode here\n```\n";
        assert_eq!(sentences(text), [4, 3, 2, 1]);
    }
}
