//! Single-file .NET programs: a host that has the runtime linked in, and behind it the program and
//! the framework, as `dotnet publish --self-contained -p:PublishSingleFile=true` makes them. Such a
//! host is on NuGet only, so one is used that another program came with. On glibc that was made
//! with trimmed assemblies without precompiled code; those of a root are used, of another servicing
//! release. On musl it has the whole framework.
//!
//! The format is `Microsoft.NET.HostModel`'s (src/installer/managed of dotnet/runtime:
//! Bundle/Manifest.cs, Bundle/FileEntry.cs, AppHost/HostWriter.cs).

use std::fs;
use std::io::Write as _;
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::process::Command;

use anyhow::{Context as _, ensure};
use flate2::{Compression, write::DeflateEncoder};
use serde_json::{Map, Value, json};

/// Stands in a host behind the place for where its bundle's header is.
const SIGNATURE: [u8; 32] = [
    0x8b, 0x12, 0x02, 0xb9, 0x6a, 0x61, 0x20, 0x38, 0x72, 0x7b, 0x93, 0x02, 0x14, 0xd7, 0xa0, 0x32,
    0x13, 0xf5, 0xb9, 0xe6, 0xef, 0xae, 0x33, 0x18, 0xee, 0x3b, 0x2d, 0xce, 0x24, 0xb3, 0x6a, 0xae,
];
/// Version of the header, since .NET 6.
const VERSION: u32 = 6;
/// Assemblies begin at such multiples, and so hardly one at a page: the runtime maps the pages that
/// its sections touch.
const ALIGNMENT: usize = 16;
/// Room for the name of the host's assembly; it has more.
const MOST_NAME: usize = 64;

/// `FileType` of Bundle/FileType.cs.
const ASSEMBLY: u8 = 1;
const DEPS: u8 = 3;
const CONFIG: u8 = 4;

const FRAMEWORK: &str = "runtimepack.Microsoft.NETCore.App.Runtime.linux-x64";

/// How the assemblies of a program are put into its file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Packing {
    /// As they are.
    Plain,
    /// Compressed, as with `EnableCompressionInSingleFile`: the runtime unpacks them into memory.
    Compressed,
}

/// A file in a bundle.
struct Entry {
    offset: usize,
    size: usize,
    /// Its bytes in the bundle, 0 where it is not compressed.
    compressed: usize,
    kind: u8,
    name: String,
}

/// A bundle, and what is in it.
struct Bundle {
    bytes: Vec<u8>,
    entries: Vec<Entry>,
}

impl Bundle {
    fn read(bytes: Vec<u8>) -> anyhow::Result<Self> {
        let at = header_place(&bytes)?;
        let mut reader = Reader { bytes: &bytes, at };
        reader.at = reader.number()?;
        let (major, minor, count) = (reader.word()?, reader.word()?, reader.word()?);
        ensure!(major == VERSION, "a bundle of version {major}.{minor}, and {VERSION} is known");
        reader.text()?;
        // Where deps.json and runtimeconfig.json are, and flags.
        reader.take(5 * 8)?;
        let entries = (0..count).map(|_| reader.entry()).collect::<anyhow::Result<_>>()?;
        Ok(Self { bytes, entries })
    }

    /// The host alone, for the assembly `name`.
    fn host(&self, name: &str) -> anyhow::Result<Vec<u8>> {
        let first =
            self.entries.iter().map(|entry| entry.offset).min().context("an empty bundle")?;
        let mut host = self.bytes.get(..first).context("it ends early")?.to_vec();
        let own = self.of_kind(DEPS)?.name.replace(".deps.json", ".dll\0");
        let at =
            find(&host, own.as_bytes()).context("the host does not say which assembly it runs")?;
        let place = host.get_mut(at..at + MOST_NAME).context("it ends early")?;
        ensure!(name.len() < MOST_NAME, "{name}: too long");
        let rest = place.iter().skip(own.len());
        ensure!(
            rest.into_iter().all(|byte| *byte == 0),
            "what looks like the assembly's name is none"
        );
        place.fill(0);
        place.iter_mut().zip(name.as_bytes()).for_each(|(to, from)| *to = *from);
        Ok(host)
    }

    fn content(&self, entry: &Entry) -> anyhow::Result<&[u8]> {
        let end = entry.offset.checked_add(entry.size).context("it ends early")?;
        self.bytes.get(entry.offset..end).context("it ends early")
    }

    /// The framework's assemblies, by what deps.json says of them.
    fn framework(&self) -> anyhow::Result<Vec<(String, &[u8])>> {
        let deps: Value = serde_json::from_slice(self.content(self.of_kind(DEPS)?)?)?;
        let targets = deps.get("targets").and_then(Value::as_object).context("no targets")?;
        let libraries = targets.values().filter_map(Value::as_object).flatten();
        let names: Vec<&String> = libraries
            .filter(|(library, _)| library.starts_with("runtimepack."))
            .filter_map(|(_, facts)| facts.get("runtime")?.as_object())
            .flat_map(Map::keys)
            .collect();
        let own = self.entries.iter().filter(|entry| names.contains(&&entry.name));
        own.map(|entry| Ok((entry.name.clone(), self.content(entry)?))).collect()
    }

    fn of_kind(&self, kind: u8) -> anyhow::Result<&Entry> {
        self.entries
            .iter()
            .find(|entry| entry.kind == kind)
            .with_context(|| format!("no file of kind {kind}"))
    }

    fn add(&mut self, kind: u8, name: &str, content: &[u8]) {
        if kind == ASSEMBLY {
            self.bytes.resize(self.bytes.len().next_multiple_of(ALIGNMENT), 0);
        }
        let (offset, size) = (self.bytes.len(), content.len());
        self.entries.push(Entry { offset, size, compressed: 0, kind, name: name.to_owned() });
        self.bytes.extend(content);
    }

    /// Adds an assembly.
    fn add_assembly(&mut self, name: &str, content: &[u8], packing: Packing) -> anyhow::Result<()> {
        if packing == Packing::Plain {
            self.add(ASSEMBLY, name, content);
            return Ok(());
        }
        let mut encoder = DeflateEncoder::new(Vec::new(), Compression::fast());
        encoder.write_all(content)?;
        self.add(ASSEMBLY, name, &encoder.finish()?);
        let entry = self.entries.last_mut().context("just added")?;
        (entry.compressed, entry.size) = (entry.size, content.len());
        Ok(())
    }

    /// With the header at the end, and its place in the host.
    fn finish(mut self, id: &str) -> anyhow::Result<Vec<u8>> {
        let header = self.bytes.len() as u64;
        let at = header_place(&self.bytes)?;
        let place = self.bytes.get_mut(at..at + 8).context("it ends early")?;
        place.copy_from_slice(&header.to_le_bytes());
        let mut numbers = Vec::new();
        for kind in [DEPS, CONFIG] {
            let entry = self.of_kind(kind)?;
            numbers.extend([entry.offset, entry.size]);
        }
        // No flags.
        numbers.push(0);
        for word in [VERSION, 0, u32::try_from(self.entries.len())?] {
            self.bytes.extend(word.to_le_bytes());
        }
        write_text(&mut self.bytes, id)?;
        numbers.iter().for_each(|number| self.bytes.extend((*number as u64).to_le_bytes()));
        for entry in &self.entries {
            let numbers = [entry.offset, entry.size, entry.compressed];
            numbers.iter().for_each(|number| self.bytes.extend((*number as u64).to_le_bytes()));
            self.bytes.push(entry.kind);
            write_text(&mut self.bytes, &entry.name)?;
        }
        Ok(self.bytes)
    }
}

/// Reads as .NET's `BinaryReader` does.
struct Reader<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl Reader<'_> {
    fn take(&mut self, count: usize) -> anyhow::Result<&[u8]> {
        let end = self.at.checked_add(count).context("it ends early")?;
        let taken = self.bytes.get(self.at..end).context("it ends early")?;
        self.at = end;
        Ok(taken)
    }

    fn word(&mut self) -> anyhow::Result<u32> {
        Ok(u32::from_le_bytes(self.take(4)?.try_into()?))
    }

    fn number(&mut self) -> anyhow::Result<usize> {
        Ok(usize::try_from(u64::from_le_bytes(self.take(8)?.try_into()?))?)
    }

    /// Its length, in seven bits a byte, and the text.
    fn text(&mut self) -> anyhow::Result<String> {
        let (mut length, mut shift) = (0, 0);
        loop {
            let [byte] = self.take(1)?.try_into()?;
            length |= usize::from(byte & 0x7f) << shift;
            shift += 7;
            if byte & 0x80 == 0 || shift > 28 {
                break;
            }
        }
        Ok(String::from_utf8(self.take(length)?.to_vec())?)
    }

    fn entry(&mut self) -> anyhow::Result<Entry> {
        let (offset, size, compressed) = (self.number()?, self.number()?, self.number()?);
        let [kind] = self.take(1)?.try_into()?;
        Ok(Entry { offset, size, compressed, kind, name: self.text()? })
    }
}

/// As `BinaryWriter`; a length of one byte is enough here.
fn write_text(bytes: &mut Vec<u8>, text: &str) -> anyhow::Result<()> {
    ensure!(text.len() < 128, "{text}: too long");
    bytes.push(u8::try_from(text.len())?);
    bytes.extend(text.as_bytes());
    Ok(())
}

/// Where a host has the place of its bundle's header.
fn header_place(host: &[u8]) -> anyhow::Result<usize> {
    let signature = find(host, &SIGNATURE).context("no host of a single-file program")?;
    signature.checked_sub(8).context("no host of a single-file program")
}

fn find(bytes: &[u8], wanted: &[u8]) -> Option<usize> {
    let (first, rest) = wanted.split_first()?;
    let mut at = 0;
    loop {
        at += bytes.get(at..)?.iter().position(|byte| byte == first)?;
        if bytes.get(at + 1..)?.starts_with(rest) {
            return Some(at);
        }
        at += 1;
    }
}

/// Makes the program `output` of the assembly `dll`, with the host of the single-file program
/// `donor` and the assemblies of the folder `framework`, or else the donor's, of .NET `major`. The
/// host looks for its own libraries in the folder `libraries`.
///
/// # Errors
/// When something is not there, or not as expected.
pub fn bundle(
    donor: &Path,
    framework: Option<&Path>,
    libraries: Option<&Path>,
    major: u32,
    dll: &Path,
    packing: Packing,
    output: &Path,
) -> anyhow::Result<()> {
    let read =
        |path: &Path| fs::read(path).with_context(|| format!("cannot read {}", path.display()));
    let donor = Bundle::read(read(donor)?).with_context(|| format!("{}", donor.display()))?;
    let stem = dll.file_stem().and_then(|name| name.to_str()).context("no name")?;
    let name = format!("{stem}.dll");
    let mut host = donor.host(&name)?;
    if let Some(libraries) = libraries {
        fs::write(output, host)?;
        let mut patch = Command::new("patchelf");
        let patched = patch.arg("--set-rpath").args([libraries, output]).output()?;
        ensure!(patched.status.success(), "{}", String::from_utf8_lossy(&patched.stderr));
        host = read(output)?;
    }
    let mut bundle = Bundle { bytes: host, entries: Vec::new() };
    bundle.add_assembly(&name, &read(dll)?, packing)?;
    let mut assemblies = Map::new();
    let mut add = |name: String, content: &[u8]| {
        bundle.add_assembly(&name, content, packing)?;
        assemblies.insert(name, json!({}));
        anyhow::Ok(())
    };
    if let Some(framework) = framework {
        let mut files: Vec<_> = fs::read_dir(framework)
            .and_then(Iterator::collect::<Result<_, _>>)
            .with_context(|| format!("cannot list {}", framework.display()))?;
        files.sort_by_key(fs::DirEntry::file_name);
        for file in files {
            let name = file.file_name().into_string().ok().context("a name that is no text")?;
            if name.ends_with(".dll") {
                add(name, &read(&file.path())?)?;
            }
        }
    } else {
        donor.framework()?.into_iter().try_for_each(|(name, content)| add(name, content))?;
    }
    let version = format!("{major}.0.0");
    let (target, program) =
        (format!(".NETCoreApp,Version=v{major}.0/linux-x64"), format!("{stem}/1.0.0"));
    let pack = format!("{FRAMEWORK}/{version}");
    let kind = |kind: &str| json!({ "type": kind, "serviceable": false, "sha512": "" });
    let deps = json!({
        "runtimeTarget": { "name": target, "signature": "" },
        "compilationOptions": {},
        "targets": { &target: {
            &program: { "dependencies": { FRAMEWORK: version }, "runtime": { name: {} } },
            &pack: { "runtime": assemblies },
        } },
        "libraries": { &program: kind("project"), &pack: kind("runtimepack") },
    });
    bundle.add(DEPS, &format!("{stem}.deps.json"), deps.to_string().as_bytes());
    let config = json!({ "runtimeOptions": {
        "tfm": format!("net{major}.0"),
        "includedFrameworks": [{ "name": "Microsoft.NETCore.App", "version": version }],
        "configProperties": { "System.Globalization.Invariant": true },
    } });
    bundle.add(CONFIG, &format!("{stem}.runtimeconfig.json"), config.to_string().as_bytes());
    fs::write(output, bundle.finish(stem)?)
        .with_context(|| format!("cannot write {}", output.display()))?;
    fs::set_permissions(output, fs::Permissions::from_mode(0o755))?;
    Ok(())
}
