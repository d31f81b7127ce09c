//! Names read from made memory: whole, changed, and forged.

use super::layout::{ImagePlace, ModuleLayout, RuntimeLayout, TypeHome};
use super::modules::KnownModules;
use super::paged_memory::PagedMemory;
use super::spelling::TypeWriter;
use super::{NamedMethod, NoName};
use crate::data_descriptor::RuntimeMemory;
use proptest::prelude::{any, prop, proptest};
use std::cell::RefCell;

const BASE: u64 = 0x1_0000;
const CHUNK: u64 = BASE + 0x100;
const TYPE: u64 = BASE + 0x200;
const CLASS: u64 = BASE + 0x300;
const MODULE: u64 = BASE + 0x400;
const PATH: u64 = BASE + 0x500;
const DICTIONARY: u64 = BASE + 0x600;
const DYNAMIC: u64 = BASE + 0x700;
const IMAGE: u64 = BASE + 0x2000;
const SIZE: usize = 0x4000;
/// Of a method with index 1 in its chunk.
const METHOD: u64 = CHUNK + 24 + 8;

/// Memory of a made-up process: one block.
#[derive(Clone)]
struct Block(Vec<u8>);

impl RuntimeMemory for Block {
    fn read(&self, address: u64, into: &mut [u8]) -> Option<()> {
        let at = usize::try_from(address.checked_sub(BASE)?).ok()?;
        into.copy_from_slice(self.0.get(at..at.checked_add(into.len())?)?);
        Some(())
    }
}

impl Block {
    fn put(&mut self, at: u64, bytes: &[u8]) {
        let at = usize::try_from(at - BASE).unwrap();
        self.0[at..at + bytes.len()].copy_from_slice(bytes);
    }

    fn words(&mut self, at: u64, words: &[u64]) {
        for (index, word) in words.iter().enumerate() {
            self.put(at + index as u64 * 8, &word.to_le_bytes());
        }
    }
}

/// Metadata with the class `Shop.Table<T>`, which has `Put(T, int)`, and `Shop.Till`, which has
/// `Close()`.
fn metadata() -> Vec<u8> {
    let strings = b"\0Shop\0Table`1\0Till\0Put\0Close\0Shop.dll\0<Module>\0\0\0";
    let at = |name: &str| {
        let name = [name.as_bytes(), b"\0"].concat();
        strings.windows(name.len()).position(|part| part == name).unwrap() as u16
    };
    // `instance void (!0, int)` and `void ()`.
    let blobs = [0u8, 6, 0x20, 2, 1, 0x13, 0, 8, 3, 0, 0, 1, 0, 0, 0, 0];
    let mut tables = vec![0, 0, 0, 0, 2, 0, 0, 1];
    tables.extend((1u64 << 0 | 1 << 2 | 1 << 6).to_le_bytes());
    tables.extend(0u64.to_le_bytes());
    [1u32, 3, 2].iter().for_each(|rows| tables.extend(rows.to_le_bytes()));
    [0, at("Shop.dll"), 1, 0, 0].iter().for_each(|field| tables.extend(field.to_le_bytes()));
    for (name, namespace, methods) in
        [(at("<Module>"), 0, 1), (at("Table`1"), at("Shop"), 1), (at("Till"), at("Shop"), 2)]
    {
        tables.extend(0u32.to_le_bytes());
        [name, namespace, 0, 1, methods].iter().for_each(|f: &u16| tables.extend(f.to_le_bytes()));
    }
    for (name, signature) in [(at("Put"), 1), (at("Close"), 8)] {
        tables.extend([0; 8]);
        [name, signature, 1].iter().for_each(|field: &u16| tables.extend(field.to_le_bytes()));
    }
    let guid = [7u8; 16];
    let streams: [(&[u8], &[u8]); 4] = [
        (b"#~\0\0", &tables),
        (b"#Strings\0\0\0\0", strings),
        (b"#GUID\0\0\0", &guid),
        (b"#Blob\0\0\0", &blobs),
    ];
    let mut bytes = b"BSJB\x01\0\x01\0\0\0\0\0\x04\0\0\0v4\0\0\0\0\x04\0".to_vec();
    let mut offset = bytes.len() + streams.iter().map(|(name, _)| 8 + name.len()).sum::<usize>();
    for (name, stream) in streams {
        bytes.extend((offset as u32).to_le_bytes());
        bytes.extend((stream.len() as u32).to_le_bytes());
        bytes.extend(name);
        offset += stream.len();
    }
    streams.iter().for_each(|(_, stream)| bytes.extend(*stream));
    bytes
}

/// A process with a runtime that has `Shop.Table<int>.Put`, of which code is running.
fn process() -> Block {
    let mut memory = Block(vec![0; SIZE]);
    // A method of kind 0 with the token 0x06000001, at index 1 of a chunk of four steps.
    memory.put(METHOD, &[1, 0, 1, 0, 0, 0, 0, 0]);
    memory.words(CHUNK, &[TYPE, 0]);
    memory.put(CHUNK + 16, &[3, 1, 0, 0]);
    // Generic, and row 2 of its table.
    memory.put(TYPE, &0x10u32.to_le_bytes());
    memory.put(TYPE + 8, &(2u32 << 8).to_le_bytes());
    memory.words(TYPE + 24, &[MODULE]);
    memory.words(TYPE + 40, &[CLASS, DICTIONARY + 8]);
    memory.words(CLASS + 16, &[TYPE]);
    // One dictionary, one argument: the type itself will do.
    memory.put(DICTIONARY + 4, &[1, 0, 1, 0]);
    memory.words(DICTIONARY + 8, &[DICTIONARY + 16, TYPE]);
    memory.words(MODULE, &[IMAGE, PATH]);
    let path: Vec<u8> = "/app/Shop.dll\0".encode_utf16().flat_map(u16::to_le_bytes).collect();
    memory.put(PATH, &path);
    // An image as it is mapped: the runtime's head at 0x200 of it, the metadata at 0x300.
    memory.put(IMAGE, b"MZ");
    memory.put(IMAGE + 0x3c, &0x80u32.to_le_bytes());
    memory.put(IMAGE + 0x80, b"PE\0\0");
    memory.put(IMAGE + 0x80 + 20, &240u16.to_le_bytes());
    memory.put(IMAGE + 0x98, &0x20bu16.to_le_bytes());
    memory.put(IMAGE + 0x98 + 112 + 14 * 8, &0x200u32.to_le_bytes());
    memory.put(IMAGE + 0x200, &72u32.to_le_bytes());
    let metadata = metadata();
    memory.put(IMAGE + 0x208, &0x300u32.to_le_bytes());
    memory.put(IMAGE + 0x20c, &(metadata.len() as u32).to_le_bytes());
    memory.put(IMAGE + 0x300, &metadata);
    // A dynamic method with name and signature beside it.
    memory.put(DYNAMIC + 24, &[0, 0, 0, 0, 0, 0, 7, 0]);
    memory.words(DYNAMIC, &[TYPE, 0, 0x3_03]);
    memory.put(DYNAMIC + 24 + 16, &3u32.to_le_bytes());
    memory.words(DYNAMIC + 24 + 8, &[DYNAMIC + 0x80]);
    memory.words(DYNAMIC + 24 + 24, &[DYNAMIC + 0x90]);
    memory.put(DYNAMIC + 0x80, &[0, 0, 1, 0]);
    memory.put(DYNAMIC + 0x90, b"Made\0");
    memory
}

fn layout() -> RuntimeLayout {
    let mut layout = RuntimeLayout::of_8();
    layout.types.home = TypeHome::Fields { token_flags: 8, module: 24 };
    layout.module = ModuleLayout { image: ImagePlace::Field(0), path: Some(8), own_metadata: None };
    layout
}

fn read(memory: &Block, method: u64) -> Result<NamedMethod, NoName> {
    let memory = PagedMemory::new(memory, 1 << 20);
    let modules = RefCell::<KnownModules>::default();
    TypeWriter { memory: &memory, layout: &layout(), modules: &modules }.method(method)
}

fn name(memory: &Block, method: u64) -> Result<String, NoName> {
    read(memory, method).map(|found| found.name)
}

#[test]
fn a_method_is_named_by_its_class_and_the_metadata() {
    let memory = process();
    let found = read(&memory, METHOD).unwrap();
    // The argument of its argument is cut, as types in types are.
    assert!(found.name.starts_with("Shop.Table<Shop.Table<"), "{}", found.name);
    assert!(found.name.contains(">.Put(Table<"), "{}", found.name);
    assert!(found.name.ends_with(", int)"), "{}", found.name);
    assert_eq!(
        (found.module_name.as_str(), found.module, found.token, found.dynamic),
        ("Shop.dll", MODULE, 0x0600_0001, false)
    );
}

#[test]
fn what_does_not_fit_together_has_no_name() {
    let memory = process();
    let changed = |at: u64, bytes: &[u8]| {
        let mut memory = memory.clone();
        memory.put(at, bytes);
        name(&memory, METHOD)
    };
    assert_eq!(changed(METHOD + 2, &[9]), Err(NoName::Inconsistent), "not in its chunk");
    assert_eq!(changed(CHUNK, &CLASS.to_le_bytes()), Err(NoName::Inconsistent), "no type");
    assert_eq!(changed(CLASS + 16, &[0; 8]), Err(NoName::Inconsistent), "another's class");
    assert_eq!(changed(TYPE + 9, &[3]), Err(NoName::Inconsistent), "another's method");
    assert_eq!(changed(METHOD, &[2]), Err(NoName::Inconsistent), "a method of another class");
    assert_eq!(changed(METHOD, &[9]), Err(NoName::NoMetadata), "a method that is not there");
    assert_eq!(changed(METHOD + 6, &[4]), Err(NoName::NoMetadata), "of an array");
    assert_eq!(changed(IMAGE + 0x300, b"X"), Err(NoName::NoMetadata));
    assert_eq!(changed(MODULE, &[0; 8]), Err(NoName::NoMetadata), "no image");
    assert_eq!(name(&memory, METHOD + 4), Err(NoName::Inconsistent));
    assert_eq!(name(&memory, u64::MAX), Err(NoName::Inconsistent));
}

#[test]
fn a_class_without_arguments_and_a_method_made_at_run_time() {
    let mut memory = process();
    memory.put(TYPE, &[0]);
    memory.put(TYPE + 9, &[3]);
    memory.put(METHOD, &[2]);
    assert_eq!(name(&memory, METHOD).as_deref(), Ok("Shop.Till.Close()"));
    let made = read(&memory, DYNAMIC + 24).unwrap();
    assert_eq!((made.name.as_str(), made.dynamic, made.token), ("Made()", true, 0));
    memory.put(DYNAMIC + 24 + 24, &[0; 8]);
    assert_eq!(name(&memory, DYNAMIC + 24), Err(NoName::Inconsistent), "nowhere");
}

#[test]
fn a_module_that_took_the_place_of_another_is_read_anew() {
    let mut memory = process();
    let modules = RefCell::<KnownModules>::default();
    let of = |memory: &Block| {
        let memory = PagedMemory::new(memory, 1 << 20);
        modules.borrow_mut().begin_batch();
        let writer = TypeWriter { memory: &memory, layout: &layout(), modules: &modules };
        writer.method(METHOD).unwrap().name
    };
    assert!(of(&memory).contains(".Put("));
    let at = IMAGE + 0x300;
    let metadata = metadata();
    let place = |part: &[u8]| {
        at + metadata.windows(part.len()).position(|found| found == part).unwrap() as u64
    };
    memory.put(place(b"Put\0"), b"Set\0");
    assert!(of(&memory).contains(".Put("), "the same module");
    memory.put(place(&[7; 16]), &[8; 16]);
    assert!(of(&memory).contains(".Set("), "another compilation of it");
}

proptest! {
    #[test]
    fn any_memory_ends_in_an_answer(
        noise in prop::collection::vec((0..SIZE as u64 - 8, any::<u64>()), 0..64),
        method in BASE..BASE + SIZE as u64,
    ) {
        let mut memory = process();
        for (at, value) in noise {
            memory.put(BASE + at, &value.to_le_bytes());
        }
        for method in [method, METHOD, DYNAMIC + 24] {
            if let Ok(found) = read(&memory, method) {
                assert!(found.name.len() < 2_048);
            }
        }
    }
}
