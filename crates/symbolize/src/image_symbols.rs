//! Where the symbols of each mapped file are: in it, in a separate debug file, or packed. The same
//! of its debug information, where lines are wanted.

use crate::dwarf::{self, WorkBudget};
use crate::elf_sections::{SHT_SYMTAB, Sections};
use crate::native::{self, CopyBudget, NativeError, NativeName};
use crate::native_aot::{self, AotMethods};
use crate::native_lines::NativeLines;
use crate::separate::{self, Wanted};
use crate::{ImageFile, ImageResolver};
use perfusion_host::process::guarded_io::ForeignFile;
use perfusion_model::frame::ImageId;
use perfusion_model::pretty;
use std::collections::HashMap;
use std::ops::Range;
use std::path::PathBuf;

/// Most debug files that are kept open: open files are few (`ulimit -n`). Others are looked for
/// again when names are needed.
const MAX_OPEN: usize = 8;

/// Where a file's symbols are.
#[derive(Debug)]
enum SymbolPlace {
    /// In its `.symtab`.
    Own,
    /// It has those that it exports, and no others are on this host.
    Exports,
    /// In a separate file.
    Separate(ForeignFile),
    /// In its `.gnu_debugdata`.
    Packed,
}

/// What may still be spent on the files of one window.
#[derive(Debug, Default)]
pub(crate) struct ImageBudget {
    pub(crate) copied: CopyBudget,
    lines: WorkBudget,
}

/// Names from native files.
#[derive(Debug, Default)]
pub(crate) struct ImageSymbols {
    places: HashMap<ImageId, SymbolPlace>,
    /// `None` where no lines are wanted.
    lines: Option<NativeLines>,
    directories: Vec<PathBuf>,
    /// Debug files taken, and refused because they are of another build or another owner.
    separate: u64,
    refused: u64,
    /// Tables unpacked.
    packed: u64,
}

impl ImageSymbols {
    /// Looks for debug files in these directories too.
    pub(crate) fn look_in(&mut self, directories: Vec<PathBuf>) {
        self.directories = directories;
    }

    /// From now on lines are found, too.
    pub(crate) fn find_lines(&mut self) {
        self.lines = Some(NativeLines::default());
    }

    /// The lines that were found.
    pub(crate) fn lines(&self) -> Option<&NativeLines> {
        self.lines.as_ref()
    }

    /// The same, to forget some.
    pub(crate) fn lines_mut(&mut self) -> Option<&mut NativeLines> {
        self.lines.as_mut()
    }

    /// The name of each ELF virtual address of an image, `None` where no symbol covers it. Finds
    /// their lines, too, where these are wanted.
    pub(crate) fn names(
        &mut self,
        image: ImageId,
        (of, file): (ImageFile<'_>, &ForeignFile),
        addresses: &[u64],
        (directory, budget): (&dyn ImageResolver, &mut ImageBudget),
    ) -> Result<Vec<Option<NativeName>>, NativeError> {
        let sections = Sections::read(file)?;
        self.find(image, of, (file, &sections), directory);
        self.read_lines(image, (file, &sections), addresses, &mut budget.lines);
        let mut names = self.symbols(image, (file, &sections), addresses, &mut budget.copied)?;
        name_managed(&mut names, image, (file, &sections), addresses, directory);
        Ok(names)
    }

    /// Finds lines in the file itself, else in its debug file.
    fn read_lines(
        &mut self,
        image: ImageId,
        (file, sections): (&ForeignFile, &Sections),
        addresses: &[u64],
        budget: &mut WorkBudget,
    ) {
        let Some(lines) = &mut self.lines else { return };
        if dwarf::is_in(sections) {
            lines.find(image, (file, sections), addresses, budget);
        } else if let Some(SymbolPlace::Separate(debug)) = self.places.get(&image)
            && let Ok(sections) = Sections::read(debug)
            && dwarf::is_in(&sections)
        {
            lines.find(image, (debug, &sections), addresses, budget);
        }
    }

    fn symbols(
        &self,
        image: ImageId,
        (file, sections): (&ForeignFile, &Sections),
        addresses: &[u64],
        budget: &mut CopyBudget,
    ) -> Result<Vec<Option<NativeName>>, NativeError> {
        let (own, place) = (native::names(file, addresses, budget), self.places.get(&image));
        let separate = match place {
            Some(SymbolPlace::Separate(debug)) => native::names(debug, addresses, budget),
            Some(SymbolPlace::Packed) => match separate::unpack(file, sections) {
                Some(bytes) => native::names_in(&bytes, addresses, budget),
                None => return own,
            },
            Some(SymbolPlace::Own | SymbolPlace::Exports) | None => return own,
        };
        let Ok(mut names) = separate else { return own };
        // Exports may have more than the debug file: it can be made without them.
        for (name, own) in names.iter_mut().zip(own.unwrap_or_default()) {
            if name.is_none() {
                *name = own;
            }
        }
        Ok(names)
    }

    fn find(
        &mut self,
        image: ImageId,
        of: ImageFile<'_>,
        (file, sections): (&ForeignFile, &Sections),
        directory: &dyn ImageResolver,
    ) {
        if self.places.contains_key(&image) {
            return;
        }
        let has_symbols = sections.has(SHT_SYMTAB);
        let place = if has_symbols && (self.lines.is_none() || dwarf::is_in(sections)) {
            SymbolPlace::Own
        } else {
            let found = separate::find(&Wanted {
                file,
                sections,
                path: of.path,
                build_id: of.build_id,
                mapped_by: directory.mapped_by(image),
                directories: &self.directories,
            });
            self.refused += found.refused;
            match found.file {
                Some(debug) => {
                    self.separate += 1;
                    self.make_room();
                    SymbolPlace::Separate(debug)
                }
                None if has_symbols => SymbolPlace::Own,
                None if sections.named(".gnu_debugdata").is_some() => {
                    self.packed += 1;
                    SymbolPlace::Packed
                }
                None => SymbolPlace::Exports,
            }
        };
        self.places.insert(image, place);
    }

    /// Whether nothing on this host names the functions that an image does not export.
    pub(crate) fn lacks(&self, image: ImageId) -> bool {
        matches!(self.places.get(&image), Some(SymbolPlace::Exports | SymbolPlace::Packed))
    }

    /// Looks for the debug file of an image anew, when its symbols are needed next.
    pub(crate) fn forget(&mut self, image: ImageId) {
        self.places.remove(&image);
        if let Some(lines) = &mut self.lines {
            lines.retain_images(|other| other != image);
        }
    }

    fn make_room(&mut self) {
        let open =
            |(_, place): &(&ImageId, &SymbolPlace)| matches!(place, SymbolPlace::Separate(_));
        let all: Vec<ImageId> = self.places.iter().filter(open).map(|(image, _)| *image).collect();
        if all.len() >= MAX_OPEN
            && let Some(oldest) = all.iter().min()
        {
            self.places.remove(oldest);
        }
    }

    /// Forgets images that are not known any more.
    pub(crate) fn keep(&mut self, directory: &dyn ImageResolver) {
        self.places.retain(|image, _| directory.image(*image).is_some());
        if let Some(lines) = &mut self.lines {
            lines.retain_images(|image| directory.image(image).is_some());
        }
    }

    /// Debug files taken and refused, and files whose packed tables were read; what became of
    /// lines.
    pub(crate) fn counters(&self) -> [(&'static str, u64); 5] {
        // Where no lines are wanted, nothing became of them.
        let none = NativeLines::default();
        let [lines, refused] = self.lines.as_ref().unwrap_or(&none).counters();
        [
            ("debug_files", self.separate),
            ("debug_files_refused", self.refused),
            ("packed_symbol_tables", self.packed),
            lines,
            refused,
        ]
    }
}

/// Where a program says what its methods are called, that is what they are called.
fn name_managed(
    names: &mut [Option<NativeName>],
    image: ImageId,
    (file, sections): (&ForeignFile, &Sections),
    addresses: &[u64],
    directory: &dyn ImageResolver,
) {
    let is_managed = |code: &Range<u64>| addresses.iter().any(|address| code.contains(address));
    if !native_aot::code(sections).is_some_and(|code| is_managed(&code)) {
        return;
    }
    let Some(methods) = AotMethods::read(file, sections) else { return };
    for (name, &address) in names.iter_mut().zip(addresses).filter(|(_, at)| methods.holds(**at)) {
        let start = match name {
            Some(symbol) => Some(symbol.start),
            None => directory.function_start(image, address).and_then(|entry| {
                methods.start((file, sections), entry, directory.language_data(image, address))
            }),
        };
        let symbol = name.as_ref().map(|name| name.system_name.as_str());
        let Some((start, raw)) =
            start.and_then(|start| Some((start, methods.name(start, symbol)?)))
        else {
            continue;
        };
        let system_name = symbol.map_or_else(|| raw.clone(), str::to_owned);
        *name = Some(NativeName { name: pretty::managed(&raw), system_name, start });
    }
}

#[cfg(test)]
mod tests {
    use super::{ImageBudget, ImageSymbols};
    use crate::{ImageFile, ImageResolver};
    use lzma_rust2::{XzOptions, XzWriter};
    use object::{Object as _, ObjectSymbol as _};
    use perfusion_host::process::find_build_id;
    use perfusion_host::process::guarded_io::ForeignFile;
    use perfusion_model::frame::{ImageId, ProcessId};
    use std::fs::{self, File};
    use std::io::Write as _;
    use std::path::{Path, PathBuf};
    use std::process::Command;
    use tempfile::TempDir;

    const SOURCE: &str = "
        int of_this_version[VERSION];
        static __attribute__((noinline)) int hidden_function(int x) { return x * 3 + 1; }
        int main(int argc, char **argv) { (void)argv; return hidden_function(argc); }
    ";

    /// A program whose symbols are elsewhere, and where its function is.
    struct Stripped {
        folder: TempDir,
        build_id: Option<Vec<u8>>,
        address: u64,
    }

    fn run(program: &str, arguments: &[&str]) {
        let output = Command::new(program).args(arguments).output().unwrap();
        assert!(output.status.success(), "{program}: {}", String::from_utf8_lossy(&output.stderr));
    }

    impl Stripped {
        /// `app` and `app.debug` in a folder.
        fn make(version: u32, flags: &[&str]) -> Self {
            let folder = tempfile::tempdir().unwrap();
            let of = |name: &str| folder.path().join(name).to_str().unwrap().to_owned();
            fs::write(of("app.c"), SOURCE).unwrap();
            let (source, app, debug) = (of("app.c"), of("app"), of("app.debug"));
            let version = format!("-DVERSION={version}");
            run("gcc", &[&["-O1", &version, "-o", &app, &source], flags].concat());
            let image = fs::read(&app).unwrap();
            let image = object::File::parse(&*image).unwrap();
            let function = image.symbols().find(|symbol| symbol.name() == Ok("hidden_function"));
            let address = function.unwrap().address();
            let build_id = image.build_id().unwrap().map(<[u8]>::to_vec);
            run("objcopy", &["--only-keep-debug", &app, &debug]);
            run("strip", &[&app]);
            run("objcopy", &[&format!("--add-gnu-debuglink={debug}"), &app]);
            Self { folder, build_id, address }
        }

        fn path(&self, name: &str) -> PathBuf {
            self.folder.path().join(name)
        }

        /// The name of the function, and the counters.
        fn named(&self, directories: &[&Path]) -> (Option<String>, [u64; 3]) {
            let mut symbols = ImageSymbols::default();
            symbols.look_in(directories.iter().map(|path| path.to_path_buf()).collect());
            let path = self.path("app").canonicalize().unwrap();
            let file = ForeignFile::own(File::open(&path).unwrap());
            let of = ImageFile {
                path: path.to_str().unwrap(),
                file: Some(&file),
                build_id: self.build_id.as_deref(),
            };
            let (addresses, mut budget) = ([self.address + 1], ImageBudget::default());
            let names = symbols.names(ImageId(1), (of, &file), &addresses, (&Own, &mut budget));
            let name = names.unwrap().remove(0).map(|name| name.name);
            let [debug_files, refused, packed, ..] = symbols.counters().map(|(_, count)| count);
            (name, [debug_files, refused, packed])
        }
    }

    /// Knows this process as the one that maps every image.
    struct Own;

    impl ImageResolver for Own {
        fn image(&self, _: ImageId) -> Option<ImageFile<'_>> {
            None
        }

        fn mapped_by(&self, _: ImageId) -> Option<u32> {
            Some(std::process::id())
        }

        fn live_pid(&self, _: ProcessId) -> Option<u32> {
            None
        }
    }

    fn name() -> Option<String> {
        Some("hidden_function".to_owned())
    }

    #[test]
    fn a_debug_file_is_found_beside_the_file_below_it_and_by_build_id() {
        let app = Stripped::make(1, &["-Wl,--build-id"]);
        assert_eq!(app.named(&[]), (name(), [1, 0, 0]));
        fs::create_dir(app.path(".debug")).unwrap();
        fs::rename(app.path("app.debug"), app.path(".debug/app.debug")).unwrap();
        assert_eq!(app.named(&[]), (name(), [1, 0, 0]));
        let directory = tempfile::tempdir().unwrap();
        let by_id = crate::separate::build_id_path(app.build_id.as_deref().unwrap()).unwrap();
        let by_id = directory.path().join(by_id);
        fs::create_dir_all(by_id.parent().unwrap()).unwrap();
        fs::rename(app.path(".debug/app.debug"), by_id).unwrap();
        assert_eq!(app.named(&[]), (None, [0, 0, 0]));
        assert_eq!(app.named(&[directory.path()]), (name(), [1, 0, 0]));
    }

    #[test]
    fn a_debug_file_of_another_build_is_refused_and_counted() {
        for flags in [&["-Wl,--build-id"], &["-Wl,--build-id=none"]] {
            let (app, other) = (Stripped::make(1, flags), Stripped::make(2, flags));
            fs::copy(other.path("app.debug"), app.path("app.debug")).unwrap();
            assert_eq!(app.named(&[]), (None, [0, 1, 0]));
        }
    }

    #[test]
    fn without_a_build_id_the_checksum_decides() {
        let app = Stripped::make(1, &["-Wl,--build-id=none"]);
        assert_eq!((app.build_id.as_ref(), app.named(&[])), (None, (name(), [1, 0, 0])));
        let mut debug = File::options().append(true).open(app.path("app.debug")).unwrap();
        debug.write_all(b"more").unwrap();
        assert_eq!(app.named(&[]), (None, [0, 1, 0]));
    }

    #[test]
    fn what_is_no_regular_file_is_not_opened() {
        let app = Stripped::make(1, &["-Wl,--build-id"]);
        fs::remove_file(app.path("app.debug")).unwrap();
        run("mkfifo", &[app.path("app.debug").to_str().unwrap()]);
        assert_eq!(app.named(&[]), (None, [0, 0, 0]));
        fs::remove_file(app.path("app.debug")).unwrap();
        std::os::unix::fs::symlink(app.path("app"), app.path("app.debug")).unwrap();
        assert_eq!(app.named(&[]), (None, [0, 0, 0]), "the file itself");
    }

    /// Compressed as distributions do it.
    fn packed(content: &[u8]) -> Vec<u8> {
        let mut writer = XzWriter::new(Vec::new(), XzOptions::with_preset(1)).unwrap();
        writer.write_all(content).unwrap();
        writer.finish().unwrap()
    }

    fn with_packed(content: &[u8]) -> Stripped {
        let app = Stripped::make(1, &["-Wl,--build-id"]);
        fs::write(app.path("packed"), content).unwrap();
        let section = format!(".gnu_debugdata={}", app.path("packed").to_str().unwrap());
        let add = ["--add-section", &section, app.path("app").to_str().unwrap()].map(str::to_owned);
        run("objcopy", &add.each_ref().map(String::as_str));
        app
    }

    #[test]
    fn packed_tables_are_read() {
        let app = Stripped::make(1, &["-Wl,--build-id"]);
        let tables = fs::read(app.path("app.debug")).unwrap();
        let app = with_packed(&packed(&tables));
        fs::remove_file(app.path("app.debug")).unwrap();
        assert_eq!(app.named(&[]), (name(), [0, 0, 1]));
    }

    #[test]
    fn packed_tables_that_are_none_or_too_large_give_no_names() {
        let bomb = packed(&vec![0; 65 << 20]);
        assert!(bomb.len() < 1 << 20);
        let cut = &bomb[..bomb.len() / 2];
        for content in [&b"no tables"[..], &bomb, cut, &packed(b"no ELF file")] {
            let app = with_packed(content);
            fs::remove_file(app.path("app.debug")).unwrap();
            assert_eq!(app.named(&[]).0, None);
        }
    }

    #[test]
    fn the_build_id_of_a_debug_file_is_in_its_notes() {
        let app = Stripped::make(1, &["-Wl,--build-id"]);
        let debug = ForeignFile::own(File::open(app.path("app.debug")).unwrap());
        let build_id = app.build_id.as_deref().unwrap();
        assert_eq!(crate::separate::check(&debug, build_id), Ok(()));
        assert!(crate::separate::check(&debug, &[1; 20]).is_err());
        let own = ForeignFile::own(File::open(app.path("app")).unwrap());
        assert_eq!(crate::separate::check(&own, build_id), Err("it has no symbol table"));
        assert_eq!(find_build_id(&[]), None);
    }
}
