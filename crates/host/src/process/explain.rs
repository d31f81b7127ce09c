//! By which rule an address is left, and where that rule comes from: what `perfusion inspect`
//! shows. Answers come from the same look-up that walks use.

use super::code_view::{CodeView, RulePush};
use super::live::LiveProcess;
use super::mapping::{Mapping, MappingKind, Mappings, MapsFields, parse_fields};
use super::proc_maps::maps_text;
use super::{ProcessError, ProcessTable, name};
use crate::process::handle::ProcessHandle;
use perfusion_model::event::Mmap;
use perfusion_model::frame::{FrameKey, ProcessId};
use perfusion_model::text::clean;
use perfusion_unwind::eh_frame::CfiTable;
use perfusion_unwind::rule::{FrameKind, Rule, RuleRefusal};
use serde::Serialize;
use std::ops::Range;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

/// Where a rule comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum RuleOrigin {
    /// The ELF section of call frame information.
    EhFrame,
    /// The ELF section of call frame information for debuggers.
    DebugFrame,
    /// The entry just before: a signal-return stub ends with its system call.
    SignalReturn,
    /// Instructions of a procedure linkage table without an entry.
    Plt,
    /// The dynamic loader's first instructions, where a program without an entry of its own starts.
    EntryPoint,
    /// Instructions of code without unwind data.
    Code,
    /// Instructions of an epilogue.
    Epilogue,
    /// The runtime's return-address hijack, whose entry is one word off.
    Hijack,
    /// UNWIND_INFO by the code header of JIT-compiled code.
    JitUnwindInfo,
    /// UNWIND_INFO by the exception directory of a ReadyToRun image.
    ReadyToRun,
    /// Instructions of a runtime stub.
    Stub,
    /// Nowhere: no rule.
    None,
}

/// What is known about one address.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AddressExplanation {
    /// The address looked up: one before a return address.
    pub looked_up: u64,
    /// The file or memory it is in.
    pub path: Arc<str>,
    /// Its address in the file's own numbering (ELF virtual address or relative virtual address).
    pub in_file: Option<u64>,
    /// First byte of the method body, in the process, where it is managed code.
    pub method: Option<u64>,
    /// What the table's entry covers, in the file's own numbering.
    pub function: Option<Range<u64>>,
    /// The rule, or why there is none.
    pub rule: Result<Rule, RuleRefusal>,
    /// Where the rule comes from.
    pub origin: RuleOrigin,
}

/// Why nothing can be said.
#[derive(Debug, thiserror::Error)]
pub enum ExplainError {
    /// The process.
    #[error(transparent)]
    Process(#[from] ProcessError),
    /// The file cannot be read.
    #[error("{}: {source}", path.display())]
    Open {
        /// The file.
        path: PathBuf,
        /// The system's answer.
        source: std::io::Error,
    },
    /// The file has no code that is understood here.
    #[error("{}: expected an ELF or PE file with code of this machine ({}), found \
             {found}", path.display(), std::env::consts::ARCH)]
    NotCode {
        /// The file.
        path: PathBuf,
        /// What it is.
        found: &'static str,
    },
    /// The address is in no code.
    #[error("{address:#x} is in no {place}")]
    NoCode {
        /// The address.
        address: u64,
        /// In no code or mapping of whom, and what there is instead.
        place: String,
    },
}

/// The process that stands for a file alone: no process of a user has this pid.
const NOBODY: u32 = 0;
/// Most ranges an error lists.
const LISTED: usize = 8;

impl ProcessTable {
    /// What a walk does at `address` of the running process `pid`: as the next instruction to run,
    /// or as a return address.
    ///
    /// # Errors
    /// [`ExplainError`] when the process cannot be read, or no code is at the address.
    pub fn explain_process(
        &mut self,
        pid: u32,
        address: u64,
        exact: bool,
    ) -> Result<AddressExplanation, ExplainError> {
        self.adopt(pid)?;
        self.explain(pid, address, exact)
    }

    /// The same in a file that nobody needs to run: `address` is an ELF virtual address or a
    /// relative virtual address.
    ///
    /// # Errors
    /// [`ExplainError`] when the file cannot be read or is of no use, or no code is at the address.
    pub fn explain_file(
        &mut self,
        path: &Path,
        address: u64,
        exact: bool,
    ) -> Result<AddressExplanation, ExplainError> {
        let open = |source| ExplainError::Open { path: path.to_path_buf(), source };
        let full = path.canonicalize().map_err(open)?;
        let meta = full.metadata().map_err(open)?;
        if !meta.is_file() {
            return Err(ExplainError::NotCode {
                path: path.to_path_buf(),
                found: "no regular file",
            });
        }
        let file = std::fs::File::open(&full).map_err(open)?;
        let name: Arc<str> = full.to_string_lossy().into();
        let device = (rustix::fs::major(meta.dev()), rustix::fs::minor(meta.dev()));
        let image = self.images.open(file, Arc::clone(&name), device, meta.ino());
        let image_of = image.as_ref().ok().and_then(|id| self.images.get(*id));
        let code = image_of.map(|image| image.code()).unwrap_or_default();
        if code.is_empty() {
            let mut magic = [0; 2];
            image_of.map(|image| image.read_at(0, &mut magic));
            // An assembly of IL for any CPU is a PE file for 32-bit machines (ECMA-335 II.25.2).
            let found = match &magic {
                b"MZ" => {
                    "a PE file without: a .NET assembly of IL gets its code when it runs (look it \
                     up by the pid of the process)"
                }
                _ => "something else",
            };
            return Err(ExplainError::NotCode { path: path.to_path_buf(), found });
        }
        let mut mappings = Mappings::default();
        for (range, file_offset) in code {
            let (start, len) = (range.start, range.end - range.start);
            let mmap = Mmap {
                pid: NOBODY,
                start,
                len,
                file_offset,
                device,
                inode: meta.ino(),
                path: name.to_string(),
            };
            Mapping::new(&mmap).map(|mapping| mappings.insert(mapping));
        }
        let mut process = LiveProcess::new(ProcessId(u32::MAX), NOBODY, None, Arc::new(mappings));
        // The runtime's own library is looked at as in a process that runs it.
        process.space.is_clr = name.ends_with("/libcoreclr.so");
        process.space.images.insert((device, meta.ino()), image.ok());
        self.registry.live.insert(NOBODY, process);
        let explained = self.explain(NOBODY, address, exact);
        self.registry.live.remove(&NOBODY);
        explained
    }

    fn explain(
        &mut self,
        pid: u32,
        address: u64,
        exact: bool,
    ) -> Result<AddressExplanation, ExplainError> {
        let pc = if exact { address } else { address.wrapping_sub(1) };
        let gone = ExplainError::Process(ProcessError::Gone { pid });
        let process = self.registry.live.get_mut(&pid).ok_or(gone)?;
        let Some(mapping) = process.space.mappings.find(pc).cloned() else {
            let place = match pid {
                NOBODY => place_in_file(&process.space.mappings),
                _ => {
                    let text = maps_text(pid)?;
                    let text = String::from_utf8_lossy(&text);
                    let all: Vec<MapsFields<'_>> = text.lines().filter_map(parse_fields).collect();
                    let name = ProcessHandle::open(pid).map_or(String::new(), |target| {
                        format!(" ({})", clean(&name::of(&target)))
                    });
                    place_in_process(&format!("process {pid}{name}"), &all, address)
                }
            };
            return Err(ExplainError::NoCode { address, place });
        };
        let mut view = CodeView {
            process,
            images: &mut self.images,
            rules: &mut self.rules,
            counters: &mut self.counters,
            updates: &mut self.updates,
            common: &mut self.common,
            now: Instant::now(),
            push: RulePush::Off,
            asleep: None,
            offsets: false,
        };
        let (frame, rule) = view.resolve(pc, exact);
        // Epilogues of managed code are looked for only at the next instruction to run.
        let table = matches!(frame, FrameKey::Managed { .. }).then(|| view.resolve(pc, false).1);
        let image = process.space.images.get(&(mapping.device, mapping.inode)).copied().flatten();
        let rva = image.and_then(|id| self.images.get(id)?.rva(mapping.file_offset_of(pc)));
        let path = match &*mapping.path {
            "" => "anonymous memory".into(),
            _ => Arc::clone(&mapping.path),
        };
        let mut explained = AddressExplanation {
            looked_up: pc,
            path,
            in_file: rva.map(u64::from),
            method: None,
            function: None,
            rule,
            origin: RuleOrigin::None,
        };
        match frame {
            FrameKey::Native { image, address } => {
                explained.in_file = Some(address);
                let is_plt = self.images.unwind(image).is_some_and(|unwind| unwind.is_plt(address));
                let found = self.images.get(image).and_then(|image| image.loaded_rule(address));
                explained.origin = match (found, &explained.rule) {
                    (_, Err(_)) => RuleOrigin::None,
                    (Some(Ok(found)), Ok(rule)) => {
                        let origin = match found.table {
                            _ if matches!(rule.kind, FrameKind::Stub { .. }) => RuleOrigin::Hijack,
                            _ if found.rule != *rule && rule.is_thread_start() => RuleOrigin::Code,
                            _ if found.rule != *rule => RuleOrigin::Epilogue,
                            CfiTable::EhFrame => RuleOrigin::EhFrame,
                            CfiTable::DebugFrame => RuleOrigin::DebugFrame,
                        };
                        explained.function = Some(found.function);
                        origin
                    }
                    (_, Ok(rule)) if rule.kind == FrameKind::Signal => {
                        let before = address
                            .checked_sub(1)
                            .and_then(|before| self.images.get(image)?.loaded_rule(before)?.ok());
                        let has_entry =
                            before.is_some_and(|found| found.rule.kind == FrameKind::Signal);
                        if has_entry { RuleOrigin::SignalReturn } else { RuleOrigin::Code }
                    }
                    _ if self
                        .images
                        .get(image)
                        .is_some_and(|image| image.is_loaders_start(address)) =>
                    {
                        RuleOrigin::EntryPoint
                    }
                    _ if exact && is_plt => RuleOrigin::Plt,
                    _ => RuleOrigin::Code,
                };
            }
            FrameKey::Managed { start, .. } => {
                explained.method = Some(start);
                let file = mapping.region == MappingKind::File;
                explained.origin = match (&explained.rule, file) {
                    (Err(_), _) => RuleOrigin::None,
                    (rule, _) if table.is_some_and(|table| table != *rule) => RuleOrigin::Epilogue,
                    (_, true) => RuleOrigin::ReadyToRun,
                    (_, false) => RuleOrigin::JitUnwindInfo,
                };
            }
            FrameKey::Stub { .. } if explained.rule.is_ok() => explained.origin = RuleOrigin::Stub,
            _ => {}
        }
        Ok(explained)
    }
}

/// Where the code of a file is, as the end of a sentence that begins with "in no".
fn place_in_file(mappings: &Mappings) -> String {
    let range = |mapping: &Mapping| format!("{:#x}..{:#x}", mapping.range.start, mapping.range.end);
    let mut ranges: Vec<String> = mappings.iter().take(LISTED).map(range).collect();
    if mappings.len() > LISTED {
        ranges.push(format!("{} more", mappings.len() - LISTED));
    }
    format!("code of the file: its code is in {}", ranges.join(", "))
}

/// Where an address is that is in no code of a process, which has these mappings, by address: the
/// end of the same sentence.
fn place_in_process(process: &str, all: &[MapsFields<'_>], address: u64) -> String {
    let named = |fields: &MapsFields<'_>| {
        let what =
            if fields.path.is_empty() { "anonymous memory".into() } else { clean(fields.path) };
        let sort = if fields.executable { "code" } else { "data" };
        format!("{:#x}..{:#x}, {what} ({sort})", fields.range.start, fields.range.end)
    };
    let nearest = |wanted: fn(&MapsFields<'_>) -> bool, what: &str| {
        let below = all.iter().rev().find(|fields| fields.range.end <= address && wanted(fields));
        let above = all.iter().find(|fields| fields.range.start > address && wanted(fields));
        let [below, above] =
            [below, above].map(|found| found.map_or_else(|| "nothing".to_owned(), named));
        format!("the nearest {what} below is {below}; above, {above}")
    };
    match all.iter().find(|fields| fields.range.contains(&address)) {
        _ if all.is_empty() => {
            format!(
                "mapping of {process}, which has none: a thread of the kernel, or a process that \
                 has just ended"
            )
        }
        None => format!("mapping of {process}: {}", nearest(|_| true, "mapping")),
        Some(here) => {
            let nearest = nearest(|fields| fields.executable, "code");
            format!("code of {process}: it is in {}; {nearest}", named(here))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{parse_fields, place_in_process};

    #[test]
    fn an_address_in_no_code_has_its_neighbours_named() {
        const MAPS: &str = "\
1000-3000 r--p 00000000 fd:01 7                          /usr/bin/shop
3000-5000 r-xp 00002000 fd:01 7                          /usr/bin/shop
8000-9000 rw-p 00000000 00:00 0                          [heap]
a000-b000 r-xp 00000000 00:00 0 
";
        let all: Vec<_> = MAPS.lines().filter_map(parse_fields).collect();
        let place = |address| place_in_process("process 7 (shop)", &all, address);
        assert_eq!(
            place(1),
            "mapping of process 7 (shop): the nearest mapping below is nothing; above, \
             0x1000..0x3000, /usr/bin/shop (data)"
        );
        assert_eq!(
            place(0x5000),
            "mapping of process 7 (shop): the nearest mapping below is 0x3000..0x5000, \
             /usr/bin/shop (code); above, 0x8000..0x9000, [heap] (data)"
        );
        assert_eq!(
            place(0x8fff),
            "code of process 7 (shop): it is in 0x8000..0x9000, [heap] (data); the nearest code \
             below is 0x3000..0x5000, /usr/bin/shop (code); above, 0xa000..0xb000, anonymous \
             memory (code)"
        );
        assert!(
            place(u64::MAX).ends_with("anonymous memory (code); above, nothing"),
            "{}",
            place(u64::MAX)
        );
        assert!(place_in_process("process 2", &[], 1).contains("a thread of the kernel"));
    }
}
