//! The runtime's diagnostics socket: one request a connection, as documented in dotnet/diagnostics
//! `documentation/design-docs/ipc-protocol.md`. The peer is the profiled process, so it may lie,
//! stall or send noise: its socket is opened below its own root without following a link at the
//! end, it must be the peer the kernel names, all I/O has one deadline, and an answer is at most 64
//! KiB. The events of a session follow its answer on the same connection ([`EventStream`]).

mod connection;
mod events;

pub use self::events::{EventStream, EventSubscription, listen, stop_listening};
pub(crate) use self::events::{RUNTIME_PROVIDER, listen_from_start};
pub use super::ipc_error::IpcError;
pub use super::socket::has_socket;
pub use super::wait::IpcTimeout;

use self::connection::{ResponseReader, count, request, string};
use super::hresult::Hresult;
use perfusion_host::process::handle::ProcessHandle;
use std::time::Duration;

const SET_PROFILER: u8 = 0x03;
const SET_PROCESS: u8 = 0x04;
const ATTACH_PROFILER: u8 = 0x01;
const PROCESS_INFO_2: u8 = 0x04;

/// What a runtime says about itself.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RuntimeInfo {
    /// Pid as the process sees itself.
    pub pid: u64,
    /// Architecture, `x64` or `arm64`.
    pub architecture: String,
    /// Simple name of the assembly it was started with.
    pub entry_assembly: String,
    /// Version of the runtime, for example `9.0.5`.
    pub runtime_version: String,
}

/// What to load into a runtime.
#[derive(Debug)]
pub struct AttachProfiler<'a> {
    /// Class id the library answers to, in memory order.
    pub class_id: [u8; 16],
    /// Path of the library in the target's mount namespace.
    pub path: &'a str,
    /// Handed to the library as client data.
    pub client_data: &'a [u8],
    /// How long the runtime waits for a background GC to end.
    pub wait_for_gc: Duration,
}

/// Asks for the runtime's version and the program's name. Harmless: the runtime only answers.
///
/// # Errors
/// See [`IpcError`].
pub fn process_info(
    target: &ProcessHandle,
    wait: impl Into<IpcTimeout>,
) -> Result<RuntimeInfo, IpcError> {
    let answer = request(target, SET_PROCESS, PROCESS_INFO_2, &[], wait.into())?;
    let mut reader = ResponseReader { pid: target.pid(), rest: &answer };
    let pid = u64::from_le_bytes(reader.array()?);
    let _runtime_cookie: [u8; 16] = reader.array()?;
    let _command_line = reader.string()?;
    let _operating_system = reader.string()?;
    let architecture = reader.string()?;
    let entry_assembly = reader.string()?;
    let runtime_version = reader.string()?;
    // "9.0.5" of a release, "9.0.5+hash" or "9.0.5 @Commit: hash" of other builds.
    let runtime_version = runtime_version.split(['+', ' ']).next().unwrap_or_default().to_owned();
    Ok(RuntimeInfo { pid, architecture, entry_assembly, runtime_version })
}

/// Makes the runtime load a library as a profiler; returns when the library's initialization has.
///
/// # Errors
/// See [`IpcError`]; `Refused` carries the runtime's or the library's own code.
pub(crate) fn attach_profiler(
    target: &ProcessHandle,
    what: &AttachProfiler<'_>,
    wait: impl Into<IpcTimeout>,
) -> Result<(), IpcError> {
    let pid = target.pid();
    let mut payload = Vec::new();
    payload.extend(u32::try_from(what.wait_for_gc.as_millis()).unwrap_or(u32::MAX).to_le_bytes());
    payload.extend(what.class_id);
    payload.extend(string(what.path, pid)?);
    payload.extend(count(what.client_data.len(), pid)?);
    payload.extend(what.client_data);
    let answer = request(target, SET_PROFILER, ATTACH_PROFILER, &payload, wait.into())?;
    let code = u32::from_le_bytes(ResponseReader { pid, rest: &answer }.array()?);
    // Failure is the sign bit; S_FALSE and friends are successes.
    if code & 0x8000_0000 != 0 {
        Err(IpcError::Refused { pid, code: Hresult(code) })
    } else {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::connection::{HEADER_BYTES, MAGIC};
    use super::{AttachProfiler, IpcError, ResponseReader, attach_profiler, process_info};
    use crate::attach::socket::tests::with_peer;
    use perfusion_host::process::handle::ProcessHandle;
    use proptest::{collection::vec, prelude::any, proptest};
    use std::io::{Read as _, Write as _};
    use std::os::unix::net::UnixStream;
    use std::time::{Duration, Instant};

    /// For peers that answer at once, on a machine that is busy with other things.
    const MINUTE: Duration = Duration::from_secs(60);

    fn answer(set: u8, id: u8, payload: &[u8]) -> Vec<u8> {
        let size = u16::try_from(HEADER_BYTES + payload.len()).unwrap();
        [&MAGIC[..], &size.to_le_bytes(), &[set, id, 0, 0], payload].concat()
    }

    fn string(text: &str) -> Vec<u8> {
        let units: Vec<u16> = text.encode_utf16().chain([0]).collect();
        let count = u32::try_from(units.len()).unwrap();
        count
            .to_le_bytes()
            .into_iter()
            .chain(units.into_iter().flat_map(u16::to_le_bytes))
            .collect()
    }

    #[test]
    fn process_info_is_read_as_the_runtime_sends_it() {
        let peer = |mut stream: UnixStream| {
            let mut request = [0; HEADER_BYTES];
            stream.read_exact(&mut request).unwrap();
            assert_eq!(request[14..18], [20, 0, 0x04, 0x04]);
            let mut payload = 7u64.to_le_bytes().to_vec();
            payload.extend([0; 16]);
            for text in ["dotnet app.dll", "Linux", "x64", "app", "9.0.5+abc"] {
                payload.extend(string(text));
            }
            stream.write_all(&answer(0xff, 0, &payload)).unwrap();
        };
        let info = with_peer(peer, |me| process_info(me, MINUTE)).unwrap();
        assert_eq!(
            (info.pid, info.architecture.as_str(), info.entry_assembly.as_str()),
            (7, "x64", "app")
        );
        assert_eq!(info.runtime_version, "9.0.5");
    }

    #[test]
    fn a_refusal_carries_the_runtimes_code() {
        let peer = |mut stream: UnixStream| {
            let mut head = [0; HEADER_BYTES];
            stream.read_exact(&mut head).unwrap();
            let size = usize::from(u16::from_le_bytes([head[14], head[15]]));
            let mut payload = vec![0; size - HEADER_BYTES];
            stream.read_exact(&mut payload).unwrap();
            assert_eq!(payload[..4], 500u32.to_le_bytes());
            stream.write_all(&answer(0xff, 0xff, &0x8007_007eu32.to_le_bytes())).unwrap();
        };
        let what = AttachProfiler {
            class_id: [1; 16],
            path: "/x",
            client_data: b"abc",
            wait_for_gc: Duration::from_millis(500),
        };
        let error = with_peer(peer, |me| attach_profiler(me, &what, MINUTE)).unwrap_err();
        assert!(
            matches!(error, IpcError::Refused { code, .. } if code.0 == 0x8007_007e),
            "{error}"
        );
    }

    #[test]
    fn a_silent_peer_costs_the_timeout_and_no_more() {
        let (done, wait) = std::sync::mpsc::channel::<()>();
        let peer = move |stream: UnixStream| {
            wait.recv().ok();
            drop(stream);
        };
        let (result, took) = with_peer(peer, |me| {
            let begin = Instant::now();
            let result = process_info(me, Duration::from_millis(50));
            let took = begin.elapsed();
            drop(done);
            (result, took)
        });
        let error = result.unwrap_err();
        assert!(matches!(error, IpcError::TimedOut { .. }), "{error}");
        assert!(took < MINUTE, "{took:?}");
    }

    #[test]
    fn noise_from_the_peer_is_an_error() {
        for noise in [
            b"".to_vec(),
            b"DOTNET_IPC_V1".to_vec(),
            vec![0xff; 40],
            answer(0xff, 0, b""),
            answer(0xff, 0, &[0xff; 60]),
            answer(0x01, 0, &[0; 60]),
            [&MAGIC[..], &[3, 0, 0xff, 0, 0, 0]].concat(),
        ] {
            let sent = noise.clone();
            let peer = move |mut stream: UnixStream| {
                stream.read_exact(&mut [0; HEADER_BYTES]).unwrap();
                stream.write_all(&sent).ok();
            };
            let error = with_peer(peer, |me| process_info(me, MINUTE)).unwrap_err();
            assert!(matches!(error, IpcError::Malformed { .. }), "{noise:?}: {error}");
        }
    }

    #[test]
    fn a_process_without_a_socket_is_told_from_a_silent_one() {
        // The parent of a test is cargo, or whatever shell: no .NET program.
        let parent = ProcessHandle::open(std::os::unix::process::parent_id()).unwrap();
        match process_info(&parent, MINUTE) {
            Err(IpcError::NoSocket { looked_in, .. }) => assert!(!looked_in.is_empty()),
            other => panic!("{other:?}"),
        }
    }

    proptest! {
        #[test]
        fn strings_of_any_length_are_read_or_refused(bytes in vec(any::<u8>(), 0..64)) {
            let mut reader = ResponseReader { pid: 1, rest: &bytes };
            while reader.string().is_ok() {}
        }
    }
}
