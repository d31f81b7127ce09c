//! What a file is that was taken for a profile, and what to do with it: a person who has mixed up
//! two files is helped by that, not by what protobuf makes of it.

use flate2::read::MultiGzDecoder;
use perfusion_pprof::PprofError;
use perfusion_pprof::ReadRefusal;
use std::io::{ErrorKind, Read};

/// Bytes looked at.
const LOOKED_AT: u64 = 4096;

/// The format that was found, and advice for it.
pub(super) type FormatAdvice = (String, &'static str);

/// The advice where nothing better is known.
pub(super) const RECORD: &str =
    "name a file that `perfusion record` or another pprof tool has written";
const AGAIN: &str = "copy it again, or record again: nothing of it can be shown";

/// Says what `bytes` are, which are no profile because of `why`.
pub(super) fn answer(bytes: &[u8], why: &PprofError) -> FormatAdvice {
    let is_gzip = bytes.starts_with(&[0x1f, 0x8b]);
    let mut unpacked = Vec::new();
    if is_gzip {
        // Of a damaged stream what comes before the damage tells as much.
        MultiGzDecoder::new(bytes).take(LOOKED_AT).read_to_end(&mut unpacked).ok();
    }
    match why {
        PprofError::Gzip(error) if error.kind() == ErrorKind::UnexpectedEof => {
            (format!("a gzip file that ends in the middle, after {} bytes", bytes.len()), AGAIN)
        }
        PprofError::Gzip(_) => ("a damaged gzip file".to_owned(), AGAIN),
        PprofError::TooLarge => (why.to_string(), RECORD),
        _ if is_gzip && unpacked.is_empty() => (
            "a gzip file with nothing in it".to_owned(),
            "record again: no profile was written into it",
        ),
        // It has the form of one: what is wrong with it is what a person who writes profiles wants
        // to know.
        PprofError::Refused(ReadRefusal::Concatenated) => (
            ReadRefusal::Concatenated.to_string(),
            "split them into files; `perfusion report FILE FILE...` shows several as one",
        ),
        PprofError::Refused(refusal)
            if *refusal != ReadRefusal::Wire && sort(bytes, is_gzip, &unpacked).is_none() =>
        {
            (
                format!("one that breaks a rule of the format, {refusal}"),
                "report it to the author of the file",
            )
        }
        _ => {
            let (what, todo) = sort(bytes, is_gzip, &unpacked)
                .unwrap_or(("something else, or a part of one", RECORD));
            let packed = if is_gzip { " in a gzip file" } else { "" };
            (format!("{what}{packed}"), todo)
        }
    }
}

/// The format and advice that the first bytes tell.
fn sort(bytes: &[u8], is_gzip: bool, unpacked: &[u8]) -> Option<(&'static str, &'static str)> {
    let content = if is_gzip { unpacked } else { bytes };
    let magics: [(&[u8], &str, &str); 7] = [
        (b"\x1f\x8b", "a gzip file", "unpack it once: it was packed twice"),
        (b"\x28\xb5\x2f\xfd", "a zstd file", "unpack it first: `zstd -d`"),
        (b"PK\x03\x04", "a zip file", "unpack it first"),
        (
            b"\x7fELF",
            "a program or library (ELF)",
            "name its profile; `perfusion record -- CMD` makes one",
        ),
        (b"PERFILE2", "a file of perf", "`perf report` and `perf script` read it"),
        (
            b"Nettrace",
            "an EventPipe trace",
            "`dotnet-trace report` reads it; the same process is profiled by `perfusion record \
             --pid`",
        ),
        (b"SQLite format 3", "a database", RECORD),
    ];
    if let Some((_, what, todo)) = magics.into_iter().find(|(magic, ..)| content.starts_with(magic))
    {
        return Some((what, todo));
    }
    let head = content.get(..usize::try_from(LOOKED_AT).unwrap_or(0).min(content.len()))?;
    let text = text(head)?;
    let start = text.trim_start();
    // Heads of the formats that pprof had before it took to protobuf (github.com/google/pprof,
    // profile/legacy_profile.go).
    let legacy = [
        "heap profile:",
        "goroutine profile:",
        "threadcreate profile:",
        "--- heap",
        "--- growth",
        "--- contention",
        "--- mutex",
        "--- thread",
    ];
    Some(if legacy.iter().any(|head| start.starts_with(head)) {
        (
            "a profile in the text format that pprof had before",
            "`go tool pprof -proto -output=NEW.pb.gz FILE` makes one of it that can be read here",
        )
    } else if start.starts_with(['{', '[']) {
        (
            "JSON",
            "what `record --exact` has counted is shown by `report --exact`; else name the profile \
             itself",
        )
    } else if start.starts_with('<') {
        (
            "HTML or XML",
            "a flame graph (`report --format flame`) is opened in a browser; its profile is \
             another file",
        )
    } else if is_folded(start) {
        ("folded stacks", "they are a report already; name the profile they were made from")
    } else {
        ("text", RECORD)
    })
}

/// The text at the beginning of a file, if that is what it is.
fn text(head: &[u8]) -> Option<&str> {
    let text = match std::str::from_utf8(head) {
        Ok(text) => text,
        // A character that the end cuts.
        Err(error) if error.error_len().is_none() => {
            std::str::from_utf8(head.get(..error.valid_up_to())?).ok()?
        }
        Err(_) => return None,
    };
    // A short message of protobuf may well be UTF-8, but not without control characters: those are
    // its tags and lengths.
    let printable = |c: char| !c.is_control() || matches!(c, '\n' | '\r' | '\t' | '\x1b');
    (!text.is_empty() && text.chars().all(printable)).then_some(text)
}

/// `main;work 42`, line by line.
fn is_folded(text: &str) -> bool {
    let line = text.lines().next().unwrap_or_default();
    let stack_and_value = line.rsplit_once(' ');
    stack_and_value
        .is_some_and(|(stack, value)| stack.contains(';') && value.parse::<u64>().is_ok())
}

#[cfg(test)]
mod tests {
    use super::answer;
    use flate2::{Compression, write::GzEncoder};
    use perfusion_pprof::read::read;
    use std::error::Error as _;
    use std::io::Write as _;
    use std::path::Path;

    fn gzip(bytes: &[u8]) -> Vec<u8> {
        let mut encoder = GzEncoder::new(Vec::new(), Compression::fast());
        encoder.write_all(bytes).unwrap();
        encoder.finish().unwrap()
    }

    /// Found and to do, in one line.
    fn said(bytes: &[u8]) -> String {
        let (found, todo) = answer(bytes, &read(bytes).unwrap_err());
        let said = format!("{found}: {todo}");
        let whole = crate::decoded(Path::new("x"), bytes).unwrap_err();
        assert!(whole.source().is_none(), "the reason would stand twice: {whole}");
        assert!(whole.to_string().ends_with(&said), "{whole}");
        for internal in ["Protobuf", "wire type", "Profile.", "deflate"] {
            assert!(!said.contains(internal), "{said}");
        }
        said
    }

    #[test]
    fn what_is_no_profile_is_told_for_what_it_is() {
        let legacy = b"heap profile: 1: 2 [ 1: 2] @ heap/1048576\n1: 2 [1: 2] @ 0x1\n";
        let packed = gzip(b"hello world\n");
        let long = gzip(&(0..100_000u32).flat_map(u32::to_le_bytes).collect::<Vec<_>>());
        for (bytes, words) in [
            (&b"hello world, some text\n"[..], &["text: ", "perfusion record"][..]),
            ("größer\n".as_bytes(), &["text: "]),
            (&packed, &["text in a gzip file"]),
            (
                &packed[..packed.len() - 9],
                &["a gzip file that ends in the middle, after 23 bytes", "copy it again"],
            ),
            (&long[..long.len() / 2], &["ends in the middle", "record again"]),
            (&[&packed[..10], &[0xff; 20]].concat(), &["a damaged gzip file"]),
            (&gzip(b""), &["a gzip file with nothing in it"]),
            (&gzip(&gzip(b"x")), &["packed twice"]),
            (legacy, &["text format that pprof had before", "go tool pprof -proto"]),
            (&gzip(legacy), &["pprof had before in a gzip file"]),
            (b"{\"version\": 1}", &["JSON", "report --exact"]),
            (b"<!doctype html>", &["HTML", "browser"]),
            (b"main;work 42\nmain 1\n", &["folded stacks"]),
            (b"\x7fELF\x02\x01\x01", &["ELF"]),
            (b"PERFILE2", &["a file of perf", "perf script"]),
            (b"Nettrace\x14\0\0\0", &["EventPipe"]),
            (&[0xff, 0xfe, 0x00, 0x01], &["something else", "perfusion record"]),
        ] {
            let said = said(bytes);
            assert!(words.iter().all(|word| said.contains(word)), "no {words:?}: {said}");
        }
    }

    #[test]
    fn a_profile_that_breaks_a_rule_is_told_which() {
        // Two strings, of which the first is not empty (field 6 of profile.proto).
        let said = said(b"\x32\x01a\x32\x01b");
        assert!(said.contains("breaks a rule of the format"), "{said}");
    }
}
