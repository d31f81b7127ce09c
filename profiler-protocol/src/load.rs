//! What a shim is told when it is loaded: the class id, and whom its region is for, which says too
//! what that one subscribes to. Pure.

/// Class id the runtime asks the library for; any would do, for a runtime passes on what it was
/// given. {9A1B7B5E-5F0B-4C0E-9B5F-50455246494E}, in memory order.
pub const CLASS_ID: [u8; 16] = [
    0x5e, 0x7b, 0x1b, 0x9a, 0x0b, 0x5f, 0x0e, 0x4c, 0x9b, 0x5f, 0x50, 0x45, 0x52, 0x46, 0x49, 0x4e,
];

/// Environment variable with the owner as 16 hexadecimal digits, for shims that are loaded by
/// environment.
pub const OWNER_VARIABLE: &str = "PERFUSION_OWNER";

/// Environment variable with the path of the library, for shims that are loaded by environment.
/// Whoever records holds an exclusive `flock` on that file, and removes it at the end.
pub const LOCK_VARIABLE: &str = "PERFUSION_LOCK";

/// Longest path in [`LOCK_VARIABLE`], in bytes; all of them ASCII.
pub const LOCK_PATH_BYTES: usize = 254;

/// A process that is loaded by environment waits so long for its recorder, at most, and only while
/// the recorder holds its lock.
pub const START_WAIT_NS: u64 = 1_000_000_000;

/// A recorder goes without exceptions.
pub const WITHOUT_EXCEPTIONS: u64 = 1;
/// A recorder goes without waits for locks.
pub const WITHOUT_CONTENTION: u64 = 2;
/// A recorder subscribes to changes of thread pools.
pub const WITH_THREAD_POOL: u64 = 4;
/// A recorder goes without allocations of this process, and so without its live objects.
pub const WITHOUT_ALLOCATIONS: u64 = 8;
/// A recorder goes without live objects of this process.
pub const WITHOUT_LIVE_OBJECTS: u64 = 16;
/// A recorder subscribes to what exceptions say.
pub const WITH_EXCEPTION_MESSAGES: u64 = 32;
/// A recorder opens an event session before the first object: a process that is loaded by
/// environment waits for the first beat.
pub const WITH_START_SESSION: u64 = 64;
/// A recorder wants to know which IL the code of a method comes from.
pub const WITH_IL_MAPS: u64 = 128;
/// The bits of a recorder's number that say what it subscribes to. They are part of the number
/// because that is the one thing a shim knows from its first event on, however it was loaded, and
/// learns of a recorder that takes it over. Those that mean nothing yet are 0, so that no recorder
/// of now asks for what a later one means by them.
const SUBSCRIPTIONS: u64 = 0xffff;
/// Of every number.
const SOMEBODY: u64 = 1 << 63;

/// A recorder's number: `random` but for its subscriptions. Never 0, which is nobody.
#[must_use]
pub const fn number(random: u64, subscriptions: u64) -> u64 {
    (random & !SUBSCRIPTIONS) | SOMEBODY | (subscriptions & SUBSCRIPTIONS)
}

/// The subscriptions in a recorder's number.
#[must_use]
pub const fn subscriptions(number: u64) -> u64 {
    number & SUBSCRIPTIONS
}

/// True for numbers of one recorder, whatever it subscribed to at the time.
#[must_use]
pub const fn is_same(one: u64, other: u64) -> bool {
    one & !SUBSCRIPTIONS == other & !SUBSCRIPTIONS
}

/// First bytes of an attach's client data.
const CLIENT_DATA_MAGIC: [u8; 8] = *b"PERFOWN1";

/// Client data of an attach: the magic, then `owner`.
#[must_use]
pub fn client_data(owner: u64) -> [u8; 16] {
    let mut data = [0; 16];
    for (to, from) in data.iter_mut().zip(CLIENT_DATA_MAGIC.into_iter().chain(owner.to_le_bytes()))
    {
        *to = from;
    }
    data
}

/// The owner in an attach's client data; 0 (nobody in particular) for anything else than
/// [`client_data`] makes.
#[must_use]
pub fn owner_in_client_data(data: &[u8]) -> u64 {
    match data.split_first_chunk::<8>() {
        Some((magic, rest)) if *magic == CLIENT_DATA_MAGIC => {
            rest.first_chunk::<8>().map_or(0, |owner| u64::from_le_bytes(*owner))
        }
        _ => 0,
    }
}

/// The owner in the value of [`OWNER_VARIABLE`]; 0 unless it is 1 to 16 hexadecimal digits.
#[must_use]
pub fn owner_in_variable(value: &[u8]) -> u64 {
    if value.is_empty() || value.len() > 16 {
        return 0;
    }
    let mut owner = 0u64;
    for &byte in value {
        let Some(digit) = char::from(byte).to_digit(16) else { return 0 };
        owner = owner << 4 | u64::from(digit);
    }
    owner
}

#[cfg(test)]
mod tests {
    use super::{
        WITHOUT_CONTENTION, WITHOUT_EXCEPTIONS, client_data, is_same, number, owner_in_client_data,
        owner_in_variable, subscriptions,
    };

    #[test]
    fn a_number_says_what_its_recorder_subscribes_to_and_stays_its_own() {
        let all = WITHOUT_EXCEPTIONS | WITHOUT_CONTENTION;
        for random in [0, 5, 0x0102_0304_0506_0708, u64::MAX] {
            let (with, less) = (number(random, 0), number(random, all));
            assert!(with != 0 && with != less && is_same(with, less));
            assert_eq!([with, less].map(subscriptions), [0, all]);
        }
        assert!(!is_same(number(0x1_0000, 0), number(0x2_0000, 0)));
    }

    #[test]
    fn client_data_brings_the_owner_over() {
        assert_eq!(
            client_data(0x0102_0304_0506_0708),
            *b"PERFOWN1\x08\x07\x06\x05\x04\x03\x02\x01"
        );
        assert_eq!(owner_in_client_data(&client_data(u64::MAX - 1)), u64::MAX - 1);
        for other in [&b""[..], b"PERFOWN1", b"PERFOWN1short", b"perfown1\x01\0\0\0\0\0\0\0"] {
            assert_eq!(owner_in_client_data(other), 0, "{other:?}");
        }
    }

    #[test]
    fn the_variable_brings_the_owner_over() {
        assert_eq!(owner_in_variable(b"00000000000000ff"), 255);
        assert_eq!(owner_in_variable(b"FFFFFFFFFFFFFFFF"), u64::MAX);
        for bad in [&b""[..], b"0x1", b"00000000000000001", b" 1"] {
            assert_eq!(owner_in_variable(bad), 0, "{bad:?}");
        }
    }
}
