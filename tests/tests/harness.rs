//! The harness itself: what the other tests rely on.

use std::time::Duration;

use system_tests::environment::{Need, begin};
use system_tests::{Runtime, Workload, on_runtimes};

on_runtimes!(
    workload_compiles_runs_and_tells_its_truth:
    net8 Net8, net9 Net9, net10 Net10, net11 Net11, net10_musl Net10Musl, net11_musl Net11Musl
);

fn workload_compiles_runs_and_tells_its_truth(runtime: Runtime) {
    let Some(_turn) = begin(&format!("harness: callheavy on {runtime}"), &[Need::Clr(runtime)])
    else {
        return;
    };
    let app = Workload::dotnet(runtime, "callheavy", &[]).unwrap().start().unwrap();
    assert!(app.thread("callheavy") > 0);
    let truth = app.stop().unwrap();
    assert!(truth["rounds"].as_u64().unwrap() > 0, "{truth}");
}

#[test]
fn an_app_that_dies_is_noticed() {
    let mut app = Workload::program("/bin/sh").arg("-c").arg("exit 3").spawn().unwrap();
    let error = app.await_line("ready", Duration::from_secs(60)).unwrap_err().to_string();
    assert!(error.contains("exit status: 3"), "{error}");
}
