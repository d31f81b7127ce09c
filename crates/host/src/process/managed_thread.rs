//! Names of managed threads that are older than the attach. The profiling interface reports a name
//! only when it is set, and the kernel cuts its own to 15 bytes. So the name is read from outside.
//! The runtime's thread has a handle, the handle points to the `Thread` object, and that to the
//! string.
//!
//! None of the offsets is known beforehand, and the collector may move both objects meanwhile. So
//! both are checked: the object must point back to the runtime's thread
//! (`_DONT_USE_InternalThread`), and the string must begin with the kernel's name. Where that fails
//! the thread keeps the kernel's name.

use super::memory::ProcessMemory;
use perfusion_unwind::TargetMemory;

/// Bytes of the runtime's thread in which the handle is looked for (`m_ExposedObject` of
/// src/coreclr/vm/threads.h).
const THREAD_BYTES: usize = 4096;
/// Bytes of the object in which the pointer back is looked for; the references of a class come
/// before its other fields.
const OBJECT_BYTES: usize = 128;
/// Longest name that is read, UTF-16 units.
const MAX_UNITS: usize = 256;
/// Threads in which the handle is looked for, of one process: in each that is some hundred readings
/// of 8 bytes.
const MAX_SEARCHES: usize = 4;

/// A thread of the runtime's.
#[derive(Clone, Debug)]
pub struct UnnamedThread {
    /// Its id.
    pub tid: u32,
    /// Where the runtime's thread is, by a library in the process.
    pub address: u64,
    /// What the kernel has kept of its name.
    pub comm: String,
}

/// The names of these threads of `pid`, as far as they can be proven. `begins` says whether a name
/// begins with what the kernel has kept of it.
#[must_use]
pub fn names(
    pid: u32,
    start_ticks: u64,
    wanted: Vec<UnnamedThread>,
    begins: fn(&str, &str) -> bool,
) -> Vec<(u32, String)> {
    let Some(memory) = ProcessMemory::open(pid, start_ticks) else { return Vec::new() };
    memory.with(move |memory| all(memory, &wanted, begins)).unwrap_or_default()
}

fn all(
    memory: &dyn TargetMemory,
    wanted: &[UnnamedThread],
    begins: fn(&str, &str) -> bool,
) -> Vec<(u32, String)> {
    let (mut offset, mut searches, mut found) = (None, 0, Vec::new());
    for UnnamedThread { tid, address, comm } in wanted {
        let fits = |name: &str| begins(comm, name);
        let name = match offset {
            Some(offset) => {
                address.checked_add(offset).and_then(|at| name_at(memory, *address, at, &fits))
            }
            None if searches < MAX_SEARCHES => {
                searches += 1;
                search(memory, *address, &fits).map(|(at, name)| {
                    offset = Some(at);
                    name
                })
            }
            None => break,
        };
        found.extend(name.map(|name| (*tid, name)));
    }
    found
}

/// Looks for the handle in all of the runtime's thread. Answers its offset too.
fn search(
    memory: &dyn TargetMemory,
    thread: u64,
    fits: &dyn Fn(&str) -> bool,
) -> Option<(u64, String)> {
    let mut bytes = [0; THREAD_BYTES];
    let read = memory.read(thread, &mut bytes);
    let words = bytes.get(..read)?.as_chunks::<8>().0.len();
    (0..words as u64).map(|word| word * 8).find_map(|offset| {
        name_at(memory, thread, thread.checked_add(offset)?, fits).map(|name| (offset, name))
    })
}

/// The name of the runtime's thread at `thread`, whose handle is the word at `at`.
fn name_at(
    memory: &dyn TargetMemory,
    thread: u64,
    at: u64,
    fits: &dyn Fn(&str) -> bool,
) -> Option<String> {
    let object = pointer(memory, pointer(memory, at)?)?;
    let mut bytes = [0; OBJECT_BYTES];
    let read = memory.read(object, &mut bytes);
    let (words, _) = bytes.get(..read)?.as_chunks::<8>();
    // Before the fields is the method table.
    let fields = words.iter().map(|word| u64::from_le_bytes(*word)).skip(1);
    let back = fields.clone().position(|word| word == thread)?;
    fields
        .take(back)
        .filter(|word| is_pointer(*word))
        .find_map(|text| string(memory, text).filter(|name| fits(name)))
}

/// The string object at `at`: its method table, the number of units, the units.
fn string(memory: &dyn TargetMemory, at: u64) -> Option<String> {
    let mut head = [0; 12];
    if memory.read(at, &mut head) < head.len() {
        return None;
    }
    let [.., a, b, c, d] = head;
    let units = usize::try_from(i32::from_le_bytes([a, b, c, d]))
        .ok()
        .filter(|units| *units <= MAX_UNITS)?;
    let mut bytes = vec![0; units * 2];
    if memory.read(at.checked_add(12)?, &mut bytes) < bytes.len() {
        return None;
    }
    let units: Vec<u16> =
        bytes.as_chunks::<2>().0.iter().map(|unit| u16::from_le_bytes(*unit)).collect();
    String::from_utf16(&units).ok()
}

fn pointer(memory: &dyn TargetMemory, at: u64) -> Option<u64> {
    let mut word = [0; 8];
    let whole = is_pointer(at) && memory.read(at, &mut word) == word.len();
    Some(u64::from_le_bytes(word)).filter(|word| whole && is_pointer(*word))
}

/// Aligned, and in user space.
fn is_pointer(word: u64) -> bool {
    word.is_multiple_of(8) && (0x1_0000..1 << 47).contains(&word)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What is there, from address 0x10000 on.
    struct Fake(Vec<u8>);

    const BASE: u64 = 0x1_0000;

    impl Fake {
        fn put(&mut self, at: u64, word: u64) {
            let at = (at - BASE) as usize;
            self.0[at..at + 8].copy_from_slice(&word.to_le_bytes());
        }

        fn put_string(&mut self, at: u64, text: &str) {
            let units: Vec<u16> = text.encode_utf16().collect();
            let from = (at - BASE) as usize + 8;
            self.0[from..from + 4].copy_from_slice(&(units.len() as i32).to_le_bytes());
            for (n, unit) in units.iter().enumerate() {
                self.0[from + 4 + 2 * n..][..2].copy_from_slice(&unit.to_le_bytes());
            }
        }

        /// A thread with its handle and object.
        fn put_thread(&mut self, thread: u64, offset: u64, name: &str) {
            let (handle, object, text) = (thread + 0x1000, thread + 0x1100, thread + 0x1200);
            self.put(thread + offset, handle);
            self.put(handle, object);
            self.put(object + 16, text);
            self.put(object + 40, thread);
            self.put_string(text, name);
        }
    }

    impl TargetMemory for Fake {
        fn read(&self, address: u64, into: &mut [u8]) -> usize {
            let Some(at) = address.checked_sub(BASE) else { return 0 };
            let rest = self.0.get(at as usize..).unwrap_or_default();
            let bytes = rest.len().min(into.len());
            into[..bytes].copy_from_slice(&rest[..bytes]);
            bytes
        }
    }

    fn begins(comm: &str, name: &str) -> bool {
        name.starts_with(comm)
    }

    fn wanted(address: u64, comm: &str) -> UnnamedThread {
        UnnamedThread { tid: (address >> 16) as u32, address, comm: comm.to_owned() }
    }

    #[test]
    fn a_name_is_read_where_the_object_points_back_to_its_thread() {
        let mut memory = Fake(vec![0; 0x60000]);
        memory.put_thread(0x2_0000, 0x128, "Обработчик-заказов");
        memory.put_thread(0x3_0000, 0x128, "日本語スレッド名前");
        // One that points to something else of the same form, and one without a name.
        memory.put_thread(0x4_0000, 0x128, "another");
        memory.put(0x4_0000 + 0x1100 + 40, 0x2_0000);
        memory.put(0x5_0000 + 0x128, 0x5_1000);
        let threads = [
            (0x2_0000, "Обработ"),
            (0x3_0000, "日本語スレ"),
            (0x4_0000, "another"),
            (0x5_0000, "dotnet"),
        ];
        let threads: Vec<UnnamedThread> =
            threads.iter().map(|&(at, comm)| wanted(at, comm)).collect();
        let found = all(&memory, &threads, begins);
        assert_eq!(
            found,
            [(2, "Обработчик-заказов".to_owned()), (3, "日本語スレッド名前".to_owned())]
        );
    }

    #[test]
    fn what_does_not_begin_like_the_kernels_name_is_not_the_name() {
        let mut memory = Fake(vec![0; 0x30000]);
        memory.put_thread(0x2_0000, 0x128, "moved away meanwhile");
        assert_eq!(all(&memory, &[wanted(0x2_0000, "plain-ascii-nam")], begins), []);
    }

    #[test]
    fn a_made_up_thread_costs_a_bounded_number_of_readings() {
        // Every word is a pointer to one more like it.
        let mut memory = Fake(vec![0; 0x20000]);
        for at in (BASE..BASE + 0x1_fff8).step_by(8) {
            memory.put(at, BASE + 8);
        }
        let threads: Vec<UnnamedThread> = (0..1000).map(|_| wanted(BASE, "x")).collect();
        assert_eq!(all(&memory, &threads, begins), []);
        let outside = [0, 7, u64::MAX, 1 << 46].map(|at| wanted(at, "x"));
        assert_eq!(all(&memory, &outside, begins), []);
    }
}
