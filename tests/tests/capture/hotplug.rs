//! CPUs that go and come back. In the long form only: whoever is bound to such a CPU is bound no
//! more.

use std::fs;
use std::process::Command;
use std::time::Duration;

use perfusion_model::event::EventKind;
use perfusion_sources::kernel::{KernelOptions, KernelSource};
use rustix::thread::{CpuSet, sched_setaffinity};
use system_tests::environment::{Need, long_form};
use system_tests::wait_until;

use super::{DEADLINE, NEEDS, Worker, begin, collect, spin};

const CPU: usize = 1;

/// Sends the CPU away and gets it back in the end.
struct Switch(String);

impl Switch {
    fn set(&self, online: bool) {
        fs::write(&self.0, if online { "1" } else { "0" }).unwrap();
    }
}

impl Drop for Switch {
    fn drop(&mut self) {
        fs::write(&self.0, "1").unwrap();
    }
}

/// Runs on that CPU.
fn there<T>(run: impl FnOnce() -> T) -> T {
    let bind = |cpus: &[usize]| {
        let mut set = CpuSet::new();
        cpus.iter().for_each(|cpu| set.set(*cpu));
        sched_setaffinity(None, &set).unwrap();
    };
    bind(&[CPU]);
    let result = run();
    bind(&(0..64).collect::<Vec<_>>());
    result
}

#[test]
fn a_cpu_that_was_away_is_recorded_again_and_what_it_had_told_is_not_lost() {
    if !long_form() {
        return;
    }
    let needs = [NEEDS, &[Need::File("/sys/devices/system/cpu/cpu1/online")]].concat();
    let Some(_turn) = begin("capture: hotplug", &needs) else { return };
    let switch = Switch(format!("/sys/devices/system/cpu/cpu{CPU}/online"));
    let mut source =
        KernelSource::start(&KernelOptions { exclude_self: false, ..KernelOptions::default() })
            .unwrap();
    let mut events = Vec::new();
    collect(&mut source, &mut events);
    let told = there(|| Command::new("/bin/true").spawn().unwrap());
    let pid = told.id();
    { told }.wait().unwrap();
    switch.set(false);
    // Until the next look, of which there is one a second, nobody reads the ring.
    spin(Duration::from_millis(1100));
    collect(&mut source, &mut events);
    let is_exec = |pid: u32| {
        move |kind: &EventKind| match kind {
            EventKind::Exec { pid: of, .. } => *of == pid,
            _ => false,
        }
    };
    assert!(
        events.iter().any(|event| is_exec(pid)(&event.kind)),
        "what it told before it went away"
    );
    switch.set(true);
    // Away and back between two looks.
    spin(Duration::from_millis(1100));
    collect(&mut source, &mut events);
    switch.set(false);
    switch.set(true);
    events.clear();
    let lost = wait_until("the word that something may be lost", DEADLINE, || {
        collect(&mut source, &mut events);
        events.iter().any(|event| matches!(event.kind, EventKind::ProcessRecordsLost)).then_some(())
    });
    lost.unwrap();
    let worker = there(|| Worker::start("there", || spin(Duration::from_millis(1))));
    let child = there(|| Command::new("/bin/true").spawn().unwrap());
    let pid = child.id();
    { child }.wait().unwrap();
    let found = wait_until("samples and records from there", DEADLINE, || {
        collect(&mut source, &mut events);
        let sampled = |kind: &EventKind| match kind {
            EventKind::CpuSample(sample) => sample.thread.tid == worker.tid,
            _ => false,
        };
        let any = |is: &dyn Fn(&EventKind) -> bool| events.iter().any(|event| is(&event.kind));
        (any(&sampled) && any(&is_exec(pid))).then_some(())
    });
    worker.stop();
    found.unwrap();
}
