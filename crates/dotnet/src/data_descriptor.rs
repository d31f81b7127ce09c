//! What a runtime says of its own data, for debuggers (dotnet/runtime
//! `docs/design/datacontracts/contract-descriptor.md`, .NET 9 and newer): the exported symbol
//! `DotNetRuntimeContractDescriptor` leads to JSON with offsets of fields and numbers, and to
//! pointers beside it. All of it is memory of the process, which may hold anything: sizes and
//! counts are bounded, and what it says is said of this process only.

use object::endian::LittleEndian as LE;
use object::{elf, pod};
use perfusion_host::process::elf_symbol;
use perfusion_host::process::handle::{MapLine, ProcessHandle};
use serde_json::Value;
use std::fs::File;
use std::os::unix::fs::FileExt as _;

/// The symbol.
const SYMBOL: &str = "DotNetRuntimeContractDescriptor";
/// `DNCCDAC\0`.
const MAGIC: u64 = 0x0043_4144_4343_4e44;
/// Most bytes of JSON; .NET 11 has 17 KiB.
const MOST_JSON: usize = 1 << 18;
/// Most pointers beside it, and program headers.
const MOST_POINTERS: u64 = 1024;
const MOST_HEADERS: u16 = 64;
/// Most bytes of a segment's data that are looked at.
const MOST_DATA: usize = 4 << 20;

/// What is read from.
pub trait RuntimeMemory {
    /// Fills `into` with what is at `address`, or nothing.
    fn read(&self, address: u64, into: &mut [u8]) -> Option<()>;

    /// The eight bytes at `address`.
    fn word(&self, address: u64) -> Option<u64> {
        let mut bytes = [0; 8];
        self.read(address, &mut bytes)?;
        Some(u64::from_le_bytes(bytes))
    }

    /// The four bytes at `address`.
    fn half(&self, address: u64) -> Option<u32> {
        let mut bytes = [0; 4];
        self.read(address, &mut bytes)?;
        Some(u32::from_le_bytes(bytes))
    }
}

/// The `mem` of a process. A read may be held up by whoever serves a file that is mapped there: to
/// be read by `perfusion_host::process::guarded_io::wait_for`.
#[derive(Debug)]
pub struct ProcessMemoryFile(pub File);

impl ProcessMemoryFile {
    /// Where a symbol is that the file exports that is mapped at `base`.
    #[must_use]
    pub fn exported(&self, base: u64, symbol: &str) -> Option<u64> {
        elf_symbol::in_memory(self.0.try_clone().ok()?, base, symbol)
    }

    /// Where the runtime whose file is mapped at `base` describes itself.
    #[must_use]
    pub fn descriptor(&self, base: u64) -> Option<u64> {
        self.exported(base, SYMBOL)
    }
}

impl RuntimeMemory for ProcessMemoryFile {
    fn read(&self, address: u64, into: &mut [u8]) -> Option<()> {
        self.0.read_exact_at(into, address).ok()
    }
}

/// Where the runtime of a process is mapped: its `libcoreclr.so`, or the program itself, which has
/// it inside if it is a single file.
#[must_use]
pub fn runtime_base(target: &ProcessHandle) -> Option<u64> {
    let (mut library, mut program) = (None, None);
    let find = |line: MapLine| {
        let name = line.name.strip_suffix(" (deleted)").unwrap_or(&line.name);
        if line.offset == 0 && line.inode != 0 && !name.starts_with("/memfd:") {
            // Of files the kernel puts the program lowest; the runtime's own memory may be below.
            program.get_or_insert(line.start);
            if name.ends_with("/libcoreclr.so") {
                library = Some(line.start);
            }
        }
        library.is_none()
    };
    target.maps(find).ok()?;
    library.or(program)
}

/// The first number of the version that the library mapped at `base` says of itself, in what every
/// build of it has: `@(#)Version 8.0.3226.50405`.
#[must_use]
pub fn major_version(memory: &dyn RuntimeMemory, base: u64) -> Option<u32> {
    const MARK: &[u8] = b"@(#)Version ";
    let written = |segment: &elf::ProgramHeader64<LE>| {
        segment.p_type.get(LE) == elf::PT_LOAD && segment.p_flags.get(LE) & elf::PF_W != 0
    };
    let segments = segments(memory, base)?;
    segments.iter().filter(|segment| written(segment)).find_map(|segment| {
        let size = usize::try_from(segment.p_filesz.get(LE)).ok()?.min(MOST_DATA);
        let mut bytes = vec![0; size];
        memory.read(base.checked_add(segment.p_vaddr.get(LE))?, &mut bytes)?;
        let at = memchr::memmem::find(&bytes, MARK)? + MARK.len();
        let digits = bytes.get(at..)?.iter().take(4).take_while(|byte| byte.is_ascii_digit());
        let text: String = digits.map(|&byte| char::from(byte)).collect();
        text.parse().ok()
    })
}

/// The program headers of the file that is mapped at `base`.
fn segments(memory: &dyn RuntimeMemory, base: u64) -> Option<Vec<elf::ProgramHeader64<LE>>> {
    let mut header = [0; 64];
    memory.read(base, &mut header)?;
    let (header, _) = pod::from_bytes::<elf::FileHeader64<LE>>(&header).ok()?;
    if header.e_ident.magic != elf::ELFMAG {
        return None;
    }
    let at = base.checked_add(header.e_phoff.get(LE))?;
    let size = size_of::<elf::ProgramHeader64<LE>>();
    let segment = |index: u16| {
        let mut bytes = [0; 56];
        memory.read(at.checked_add(u64::from(index) * size as u64)?, &mut bytes)?;
        pod::from_bytes::<elf::ProgramHeader64<LE>>(&bytes).ok().map(|(segment, _)| *segment)
    };
    (0..header.e_phnum.get(LE).min(MOST_HEADERS)).map(segment).collect()
}

/// The description, read.
#[derive(Debug)]
pub struct DataDescriptor {
    json: Value,
    /// Where the pointers beside it are, and how many.
    pointers: (u64, u64),
}

impl DataDescriptor {
    /// Reads the one at this address ([`ProcessMemoryFile::descriptor`]).
    pub fn read(memory: &dyn RuntimeMemory, at: u64) -> Option<Self> {
        let size = usize::try_from(memory.half(at.checked_add(12)?)?).ok()?;
        if memory.word(at)? != MAGIC || size > MOST_JSON {
            return None;
        }
        let mut text = vec![0; size];
        memory.read(memory.word(at.checked_add(16)?)?, &mut text)?;
        let json = serde_json::from_slice(text.strip_suffix(b"\0").unwrap_or(&text)).ok()?;
        let count = u64::from(memory.half(at.checked_add(24)?)?).min(MOST_POINTERS);
        Some(Self { json, pointers: (memory.word(at.checked_add(32)?)?, count) })
    }

    /// Where a field is in its structure.
    #[must_use]
    pub fn offset(&self, of: &str, field: &str) -> Option<u64> {
        number(self.json.get("types")?.get(of)?.get(field)?)
    }

    /// A number of the runtime's.
    #[must_use]
    pub fn number(&self, name: &str) -> Option<u64> {
        let value = self.json.get("globals")?.get(name)?;
        let text = value.get(0).unwrap_or(value).as_str()?;
        u64::from_str_radix(text.strip_prefix("0x")?, 16).ok()
    }

    /// Where a variable of the runtime is.
    pub fn variable(&self, memory: &dyn RuntimeMemory, name: &str) -> Option<u64> {
        let pointer = number(self.json.get("globals")?.get(name)?)?;
        let (pointers, count) = self.pointers;
        if pointer >= count {
            return None;
        }
        memory.word(pointers.checked_add(pointer * 8)?)
    }
}

/// `16`, `[16, "type"]`, `[[3], "pointer"]`: an offset, or the number of a pointer.
fn number(value: &Value) -> Option<u64> {
    match value {
        Value::Array(parts) => number(parts.first()?),
        value => value.as_u64(),
    }
}

#[cfg(test)]
mod tests {
    use super::{DataDescriptor, RuntimeMemory, number};
    use proptest::prelude::{any, proptest};

    /// Memory from address 0x1000 on.
    struct Fake(Vec<u8>);

    impl RuntimeMemory for Fake {
        fn read(&self, address: u64, into: &mut [u8]) -> Option<()> {
            let at = usize::try_from(address.checked_sub(0x1000)?).ok()?;
            into.copy_from_slice(self.0.get(at..at.checked_add(into.len())?)?);
            Some(())
        }
    }

    #[test]
    fn offsets_come_with_and_without_their_types() {
        let of = |text: &str| number(&serde_json::from_str(text).unwrap());
        assert_eq!(
            [of("16"), of("[16, \"pointer\"]"), of("[[3], \"pointer\"]")],
            [Some(16), Some(16), Some(3)]
        );
        assert_eq!(of("\"x\""), None);
    }

    proptest! {
        #[test]
        fn any_memory_is_read_or_refused(
            bytes in proptest::collection::vec(any::<u8>(), 4096),
            at in 0x1000..0x2000_u64,
        ) {
            if let Some(found) = DataDescriptor::read(&Fake(bytes), at) {
                std::hint::black_box(found.offset("Thread", "Id"));
            }
        }
    }
}
