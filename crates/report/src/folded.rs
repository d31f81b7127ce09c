//! One stack a line: frames from the root, `;` between them, a space, the value.
//!
//! The format has no escape of its own. Its readers (flamegraph.pl, inferno, speedscope) part a
//! line at the last space and the stack at each `;`. They cut blanks at both ends, and take a
//! second number at the end for a second value. So what a name must not have is written as
//! `\u{3b}`, the way control characters are: `;`, a blank that ends or begins a name or stands
//! before a number at its end, any blank but the space, and the `#` that begins a comment. A reader
//! that knows nothing of it shows the escape; names that differ stay different.

use super::ReportError;
use super::stacks::{ProfileStacks, ProfileView, ViewedSamples};
use perfusion_pprof::proto::Profile;
use std::borrow::Cow;
use std::collections::BTreeMap;
use std::io::Write;

/// Stands for the frames of a sample that has none.
const NO_STACK: &str = "[no stack]";

/// The values and stacks that the lines do not show.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct UnshownStacks {
    /// The value of parked threads.
    pub parked: i128,
    /// Stacks whose value is below zero. They are written, but other tools leave them out.
    pub negative: usize,
}

/// Writes the stacks with a value of `sample_type` that `view` shows, sorted; equal ones are added
/// up. Labels to group by are the roots of each.
///
/// # Errors
/// When there is no such sample type or label, or `output` fails.
pub fn write(
    profile: &Profile,
    sample_type: &str,
    view: &ProfileView,
    output: &mut dyn Write,
) -> Result<UnshownStacks, ReportError> {
    let stacks = ProfileStacks::viewed(profile, view);
    let column = stacks.sample_type(sample_type)?;
    stacks.check(view)?;
    let mut lines: BTreeMap<String, i128> = BTreeMap::new();
    let ViewedSamples { values, idle, .. } = stacks.values(column, view);
    for (sample, value) in values {
        let mut names: Vec<Cow<'_, str>> =
            stacks.frames(sample).map(|frame| escaped(&frame.name)).collect();
        let groups = stacks.groups(sample, &view.by);
        names.extend(groups.iter().rev().map(|value| Cow::Owned(escaped(value).into_owned())));
        names.reverse();
        let line = match names.as_slice() {
            [] => NO_STACK.to_owned(),
            // A function may be called so.
            [name] if name == NO_STACK => format!("{}{}", escape('['), &NO_STACK[1..]),
            names => names.join(";"),
        };
        *lines.entry(line).or_insert(0) += i128::from(value);
    }
    let mut negative = 0;
    for (line, value) in lines.iter().filter(|(_, value)| **value != 0) {
        negative += usize::from(*value < 0);
        writeln!(output, "{line} {value}")?;
    }
    Ok(UnshownStacks { parked: idle, negative })
}

fn escape(c: char) -> String {
    format!("\\u{{{:x}}}", u32::from(c))
}

/// A name that readers take for one, and for the same one. Control characters were escaped before.
fn escaped(name: &str) -> Cow<'_, str> {
    let last = name.len().saturating_sub(1);
    // What follows the last space, if readers could take it for a number.
    let before_number = name.rfind(' ').filter(|&at| {
        let end = name.get(at + 1..).unwrap_or_default();
        end.starts_with(|c: char| c.is_ascii_digit() || matches!(c, '.' | '-' | '+'))
    });
    let must = |at: usize, c: char| match c {
        ';' => true,
        '#' => at == 0,
        ' ' => at == 0 || at == last || before_number == Some(at),
        c => c.is_whitespace(),
    };
    if !name.char_indices().any(|(at, c)| must(at, c)) {
        return Cow::Borrowed(name);
    }
    let mut text = String::with_capacity(name.len() + 8);
    for (at, c) in name.char_indices() {
        if must(at, c) { text.push_str(&escape(c)) } else { text.push(c) }
    }
    Cow::Owned(text)
}

#[cfg(test)]
mod tests {
    use super::escaped;
    use proptest::prelude::{Strategy, prop_assert, prop_assert_eq, proptest};

    /// The name before it was escaped, which a reader of the format may do.
    fn unescaped(text: &str) -> String {
        let mut name = String::new();
        let mut rest = text;
        while let Some((before, after)) = rest.split_once("\\u{") {
            name.push_str(before);
            let (code, after) = after.split_once('}').unwrap();
            name.push(char::from_u32(u32::from_str_radix(code, 16).unwrap()).unwrap());
            rest = after;
        }
        name + rest
    }

    #[test]
    fn names_that_readers_would_part_or_cut_are_escaped_and_no_others() {
        for (name, expected) in [
            ("Ns.Map<string, Ns.Item[]>.Add(Ns.Item)", "Ns.Map<string, Ns.Item[]>.Add(Ns.Item)"),
            ("do work; now (x) 42", "do work\\u{3b} now (x)\\u{20}42"),
            ("do work: now (x) 42", "do work: now (x)\\u{20}42"),
            ("a b 7", "a b\\u{20}7"),
            ("tail 1.5", "tail\\u{20}1.5"),
            (" ", "\\u{20}"),
            (" x ", "\\u{20}x\\u{20}"),
            ("# note", "\\u{23} note"),
            ("a\u{a0}b", "a\\u{a0}b"),
            ("größe 4ü", "größe\\u{20}4ü"),
        ] {
            assert_eq!(escaped(name), expected);
        }
    }

    fn name() -> impl Strategy<Value = String> {
        "[a-c0-9;# .<>(),:\\u{a0}\\u{2003}\\-+]{1,12}"
    }

    proptest! {
        #[test]
        fn a_name_is_read_back(name in name()) {
            prop_assert_eq!(unescaped(&escaped(&name)), name);
        }

        /// As the strictest reader has it: blanks cut, the last word is the value, no second value,
        /// `;` parts frames.
        #[test]
        fn a_line_is_read_as_the_frames_it_was_made_of(
            names in proptest::collection::vec(name(), 1..6),
            value in 1u64..1000,
        ) {
            let frames: Vec<_> = names.iter().map(|name| escaped(name)).collect();
            let line = format!("{} {value}", frames.join(";"));
            let (stack, read) = line.trim().rsplit_once(char::is_whitespace).unwrap();
            prop_assert_eq!(read.parse::<u64>().unwrap(), value);
            let is_number = |(_, word): (&str, &str)| word.parse::<f64>().is_ok();
            let has_two_values = stack.rsplit_once(' ').is_some_and(is_number);
            prop_assert!(!has_two_values && !stack.starts_with('#'), "{}", line);
            let frames: Vec<String> = stack.split(';').map(unescaped).collect();
            prop_assert_eq!(frames, names);
        }
    }
}
