//! binutils' addr2line is the judge of honest files. Hostile ones must cost little and end nothing.

use super::sections::WorkBudget;
use super::{AddressLines, lines};
use crate::elf_sections::Sections;
use object::{Object as _, ObjectSymbol as _};
use perfusion_host::process::guarded_io::ForeignFile;
use std::fs::{self, File};
use std::process::Command;
use tempfile::TempDir;

/// Functions in functions, in several files, and one that calls itself.
const SOURCE: &str = r#"
#include "part.h"
volatile unsigned sink;
static inline unsigned inner(unsigned x) {
    for (unsigned i = 0; i < 100; i++)
        x = x * 31 + i;
    return x;
}
static inline unsigned middle(unsigned x) {
    x ^= 5;
    x = inner(x) / 3;
    return part(x) + inner(x + 1);
}
__attribute__((noinline)) unsigned outer(unsigned x) {
    if (x > 10)
        return outer(x / 2) + middle(x);
    return middle(x) + 7;
}
int main(int argc, char **argv) {
    sink = outer(argc) + middle((unsigned char)argv[0][0]);
    return 0;
}
"#;
const PART: &str = "
static inline unsigned part(unsigned x) {
    while (x > 1000)
        x = x / 3 + 1;
    return x;
}
";

fn run(program: &str, arguments: &[&str], folder: &TempDir) -> String {
    let output = Command::new(program).args(arguments).current_dir(folder).output().unwrap();
    assert!(output.status.success(), "{program}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

/// The program, built with these flags, in a folder.
fn built(flags: &[&str]) -> TempDir {
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("app.c"), SOURCE).unwrap();
    fs::write(folder.path().join("part.h"), PART).unwrap();
    run("gcc", &[&["-O2", "-o", "app", "app.c"], flags].concat(), &folder);
    folder
}

/// All addresses of the program's functions.
fn addresses(folder: &TempDir) -> Vec<u64> {
    let image = fs::read(folder.path().join("app")).unwrap();
    let image = object::File::parse(&*image).unwrap();
    let own = image.symbols().filter(|symbol| matches!(symbol.name(), Ok("outer" | "main")));
    own.flat_map(|symbol| symbol.address()..symbol.address() + symbol.size()).collect()
}

/// The lines of addresses in a file, and how much of it was refused.
fn found(
    folder: &TempDir,
    name: &str,
    addresses: &[u64],
    mut budget: WorkBudget,
) -> (Vec<AddressLines>, Result<u64, super::DwarfError>) {
    let file = ForeignFile::own(File::open(folder.path().join(name)).unwrap());
    let sections = Sections::read(&file).unwrap();
    let mut all = vec![AddressLines::default(); addresses.len()];
    let of = (&file, &sections);
    let refused = lines(of, &mut None, addresses, &mut budget, |at, lines| all[at] = lines);
    (all, refused)
}

/// The functions and lines of each address, innermost first. The outermost function is left out:
/// a symbol names it.
fn ours(all: &[AddressLines]) -> Vec<Vec<String>> {
    let line = |line: &Option<super::SourceLine>| match line {
        Some(line) => format!("{}:{}", line.file.rsplit('/').next().unwrap(), line.line),
        None => "?".to_owned(),
    };
    let of_address = |lines: &AddressLines| {
        let inlined = lines.inlined.iter();
        let inlined = inlined.map(|function| format!("{} {}", function.name, line(&function.line)));
        inlined.chain([line(&lines.line)]).collect()
    };
    all.iter().map(of_address).collect()
}

/// The same from addr2line.
fn theirs(folder: &TempDir, name: &str, addresses: &[u64]) -> Vec<Vec<String>> {
    let hex: Vec<String> = addresses.iter().map(|address| format!("0x{address:x}")).collect();
    let arguments = [&["-a", "-i", "-f", "-s", "-e", name][..], &hex.each_ref_str()].concat();
    let output = run("addr2line", &arguments, folder);
    let mut all: Vec<Vec<String>> = Vec::new();
    let mut rows = output.lines();
    while let Some(row) = rows.next() {
        if row.starts_with("0x") {
            all.push(Vec::new());
            continue;
        }
        let place = rows.next().unwrap().split(" (discriminator").next().unwrap();
        let place = if place.ends_with('?') { "?" } else { place };
        all.last_mut().unwrap().push(format!("{row} {place}"));
    }
    for of in &mut all {
        let outermost = of.last_mut().unwrap();
        *outermost = outermost.split(' ').nth(1).unwrap().to_owned();
    }
    all
}

/// References to all texts.
trait EachRefStr {
    fn each_ref_str(&self) -> Vec<&str>;
}

impl EachRefStr for Vec<String> {
    fn each_ref_str(&self) -> Vec<&str> {
        self.iter().map(String::as_str).collect()
    }
}

#[test]
fn lines_and_inlined_functions_are_those_of_addr2line_in_all_versions() {
    for flags in [
        &["-g", "-gdwarf-5"][..],
        &["-g", "-gdwarf-4"],
        &["-g", "-gdwarf-3", "-gstrict-dwarf"],
        &["-g", "-gz=zlib"],
        &["-g", "-no-pie", "-ffunction-sections", "-Wl,--gc-sections"],
        &["-g", "-flto"],
    ] {
        let folder = built(flags);
        let wanted = addresses(&folder);
        let (all, refused) = found(&folder, "app", &wanted, WorkBudget::default());
        assert_eq!(refused.unwrap(), 0, "{flags:?}");
        let (mut ours, mut theirs) = (ours(&all), theirs(&folder, "app", &wanted));
        // Where units share functions, this version of the judge is one file off.
        if flags.contains(&"-flto") {
            for row in [&mut ours, &mut theirs].into_iter().flatten().flatten() {
                *row = ["app.c", "<artificial>"]
                    .iter()
                    .fold(row.clone(), |row, file| row.replace(file, ""));
            }
        }
        assert_eq!(ours.len(), theirs.len());
        let both = ours.iter().zip(&theirs).zip(&wanted);
        for ((ours, theirs), address) in both {
            assert_eq!(ours, theirs, "{flags:?} at {address:x}");
        }
        // The judge itself must have had something to say.
        let deepest = ours.iter().map(Vec::len).max().unwrap();
        assert!(deepest >= 3 && wanted.len() > 100, "{flags:?}: {deepest} of {ours:?}");
    }
}

#[test]
fn the_64_bit_form_says_the_same_as_the_32_bit_form() {
    let ours = |flags: &[&str]| {
        let folder = built(flags);
        let (all, refused) = found(&folder, "app", &addresses(&folder), WorkBudget::default());
        assert_eq!(refused.unwrap(), 0);
        ours(&all)
    };
    assert_eq!(ours(&["-g", "-gdwarf64"]), ours(&["-g"]));
}

#[test]
fn functions_say_where_they_begin_and_files_where_they_were_compiled() {
    let folder = built(&["-g"]);
    let (all, _) = found(&folder, "app", &addresses(&folder), WorkBudget::default());
    let row = |code: &str| 1 + SOURCE.lines().position(|line| line.contains(code)).unwrap() as u32;
    let inlined = all.iter().flat_map(|lines| &lines.inlined);
    let inner = inlined.clone().find(|function| &*function.name == "inner").unwrap();
    let line = inner.line.as_ref().unwrap();
    assert_eq!(line.start_line, row("unsigned inner("));
    assert_eq!(&*line.file, folder.path().canonicalize().unwrap().join("app.c").to_str().unwrap());
    let part = inlined.clone().find(|function| &*function.name == "part").unwrap();
    let line = part.line.as_ref().unwrap();
    assert!(line.file.ends_with("/part.h") && line.start_line == 2, "{line:?}");
    let starts: Vec<u32> = all.iter().filter_map(|of| Some(of.line.as_ref()?.start_line)).collect();
    assert!(starts.contains(&row("unsigned outer(")) && starts.contains(&row("int main(")));
}

#[test]
fn a_file_without_debug_information_has_no_lines() {
    let folder = built(&["-g0"]);
    let (all, refused) = found(&folder, "app", &addresses(&folder), WorkBudget::default());
    assert!(all.iter().all(|lines| *lines == AddressLines::default()));
    assert_eq!(refused.unwrap(), 0);
}

/// An object with the sections of an assembler's source.
fn assembled(source: &str) -> TempDir {
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("app.s"), source).unwrap();
    run("gcc", &["-shared", "-nostdlib", "-o", "app", "app.s"], &folder);
    folder
}

/// A unit with code at `code`, whose further entries these are.
fn unit(entries: &str, more: &str) -> TempDir {
    assembled(&format!(
        "
        .text
        .globl code
        code: .fill 4096, 1, 0x90
        end:
        .section .debug_abbrev,\"\"
        .byte 1, 0x11, 1, 0x11, 1, 0x12, 7, 0, 0
        .byte 2, 0x2e, 1, 0x11, 1, 0x12, 7, 0, 0
        .byte 3, 0x1d, 1, 0x11, 1, 0x12, 7, 0, 0
        .byte 4, 0x1d, 0, 0x55, 0x17, 0, 0
        .byte 0
        .section .debug_info,\"\"
        .long 2f - 1f
        1: .short 5
        .byte 1, 8
        .long 0
        .byte 1
        .quad code, end - code
        {entries}
        2:
        .section .debug_line,\"\"
        .byte 0
        {more}
        "
    ))
}

fn code(folder: &TempDir) -> u64 {
    let image = fs::read(folder.path().join("app")).unwrap();
    let image = object::File::parse(&*image).unwrap();
    image.symbols().find(|symbol| symbol.name() == Ok("code")).unwrap().address()
}

#[test]
fn functions_in_functions_without_end_are_read_to_a_depth() {
    let nested = ".byte 2\n .quad code, end - code\n
        .rept 200000\n .byte 3\n .quad code, end - code\n .endr";
    let folder = unit(nested, "");
    let (all, refused) = found(&folder, "app", &[code(&folder)], WorkBudget::default());
    assert_eq!(refused.unwrap(), 0);
    assert_eq!(all[0].inlined.len(), 63);
    assert!(all[0].inlined.iter().all(|function| &*function.name == "[inlined]"));
}

#[test]
fn work_without_end_is_refused() {
    // Each of many entries has the same long list of ranges, which has none in it.
    let entries = ".byte 2\n .quad code, end - code\n
        .rept 10000\n .byte 4\n .long 0\n .endr";
    let list = ".section .debug_rnglists,\"\"\n
        .rept 100000\n .byte 5\n .quad code\n .endr\n .byte 0";
    let folder = unit(entries, list);
    let (_, refused) = found(&folder, "app", &[code(&folder)], WorkBudget::of(8 << 20));
    assert!(matches!(refused, Err(super::DwarfError::Budget)), "{refused:?}");
}

#[test]
fn files_that_are_scribbled_on_end_nothing() {
    let folder = built(&["-g"]);
    let (image, wanted) = (fs::read(folder.path().join("app")).unwrap(), addresses(&folder));
    let file = ForeignFile::own(File::open(folder.path().join("app")).unwrap());
    let sections = Sections::read(&file).unwrap();
    let names = [".debug_info", ".debug_abbrev", ".debug_line", ".debug_rnglists"];
    // A generator of Lehmer's: the same bytes each time.
    let mut random = 1_u64;
    let mut next = |below: u64| {
        random = random.wrapping_mul(48271) % 0x7fff_ffff;
        random % below
    };
    let (mut good, mut bad) = (0, 0);
    for _ in 0..300 {
        let mut image = image.clone();
        for _ in 0..4 {
            let section = sections.named(names[next(4) as usize]).unwrap();
            let at = section.offset + next(section.size);
            image[at as usize] = next(256) as u8;
        }
        fs::write(folder.path().join("wrong"), image).unwrap();
        let (all, refused) = found(&folder, "wrong", &wanted, WorkBudget::of(16 << 20));
        assert!(!matches!(refused, Err(super::DwarfError::Panic)), "the parser panicked");
        if refused.is_ok_and(|refused| refused == 0) {
            good += 1
        } else {
            bad += 1
        }
        assert!(all.iter().all(|lines| lines.inlined.len() < 64));
    }
    assert!(good > 10 && bad > 10, "{good} files were read, {bad} refused");
}
