//! Waits: what a thread waited for, how long and who ended it; and threads that slept before the profiler came.

use std::time::Duration;

use system_tests::environment::{begin, record_on};
use system_tests::perfusion::record_pid;
use system_tests::{Runtime, Sample, Workload, on_runtimes};

fn of_thread(tid: u32) -> impl Fn(&Sample) -> bool {
    let tid = tid.to_string();
    move |sample| sample.label("thread_id") == tid
}

on_runtimes!(a_thread_asleep_since_before_the_profiler_came_has_its_stack: net8 Net8, net9 Net9, net10 Net10);

fn a_thread_asleep_since_before_the_profiler_came_has_its_stack(runtime: Runtime) {
    let name = format!("waits::asleep_since_before on {runtime}");
    let Some(_turn) = begin(&name, &record_on(runtime)) else { return };
    let app = Workload::dotnet(runtime, "timedwaits", &[]).unwrap().start().unwrap();
    let asleep = app.thread("asleep");
    let (profile, outcome) = record_pid(app.pid(), Duration::from_secs(5), &[]).unwrap();
    app.stop().unwrap();

    let picture = || format!("{}\n{}", outcome.stderr, profile.describe("blocked", of_thread(asleep)));
    let all = profile.sum("wall", of_thread(asleep));
    assert!((all - profile.duration_ns).abs() * 100 <= profile.duration_ns, "{}", picture());
    // From the thread's start to where it sleeps, through the runtime, each frame with its name.
    let whole = |sample: &Sample| {
        let chain = ["TimedWaits.Program.AsleepOuter", "TimedWaits.Program.AsleepInner", "Wait", "futex"];
        let root = sample.stack.first().is_some_and(|frame| frame.mapping.contains("libc.so"));
        of_thread(asleep)(sample) && root && sample.positions(&chain).is_some() && !sample.has("[managed]")
    };
    let seen = profile.sum("blocked", |sample| whole(sample) && sample.label("wait_reason") == "futex");
    // All but what passed before the first look, which comes once the probes are in.
    assert!(seen * 100 >= all * 98, "{seen} of {all} ns:\n{}", picture());
    assert!(
        !profile
            .samples
            .iter()
            .any(|sample| of_thread(asleep)(sample) && sample.has("[waiting since before"))
    );
}
