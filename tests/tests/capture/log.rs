//! The probes' own log (`PERFUSION_LOG=probes=debug`), read in this very process.

use std::io::{self, Write};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

use perfusion_sources::kernel::{KernelOptions, KernelSource};
use tracing_subscriber::EnvFilter;

use super::{NEEDS, Worker, begin, own_options};

/// Lines of the log, as the program prints them.
#[derive(Clone, Default)]
struct Lines(Arc<Mutex<Vec<u8>>>);

impl Lines {
    fn text(&self) -> String {
        String::from_utf8_lossy(&self.0.lock().unwrap()).into_owned()
    }
}

impl Write for Lines {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.lock().unwrap().extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// What the log has, at this level, of a recording of a hundred threads where two have room.
fn lines_of_a_full_map(level: &str, options: &KernelOptions) -> String {
    let lines = Lines::default();
    let writer = lines.clone();
    let subscriber = tracing_subscriber::fmt()
        .with_env_filter(EnvFilter::new(level))
        .with_ansi(false)
        .with_target(false)
        .with_writer(move || writer.clone())
        .finish();
    tracing::subscriber::with_default(subscriber, || {
        let mut source =
            KernelSource::start(&KernelOptions { max_threads: 2, ..options.clone() }).unwrap();
        let pause = || thread::sleep(Duration::from_millis(1));
        let workers: Vec<Worker> =
            (0..100).map(|number| Worker::start(&format!("log-{number}"), pause)).collect();
        for _ in 0..20 {
            thread::sleep(Duration::from_millis(50));
            source.drain(&mut |_| {});
        }
        workers.into_iter().for_each(Worker::stop);
    });
    lines.text()
}

#[test]
fn the_probes_tell_how_they_begin_and_of_a_full_map_once_with_the_kernels_answer() {
    let Some(_turn) = begin("probes' log", NEEDS) else { return };
    let text = lines_of_a_full_map("probes=debug", &own_options());
    let told = |what: &str| text.lines().filter(|line| line.contains(what)).count();
    assert_eq!(told("DEBUG probes: waits begin"), 1, "{text}");
    assert_eq!(told("the map of threads has no room"), 1, "{text}");
    // E2BIG
    assert_eq!(told("kernel's answer -7"), 1, "{text}");
}

#[test]
fn a_log_that_nobody_reads_is_not_written() {
    let Some(_turn) = begin("no log of probes", NEEDS) else { return };
    assert_eq!(lines_of_a_full_map("probes=info", &own_options()), "");
}

#[test]
fn the_probes_of_older_kernels_have_a_log_too() {
    let Some(_turn) = begin("older probes' log", NEEDS) else { return };
    let Some(options) = super::older_options() else { return };
    let text = lines_of_a_full_map("probes=debug", &options);
    assert!(text.contains("the map of threads has no room"), "{text}");
}
