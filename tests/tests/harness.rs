//! The harness itself: what the other tests rely on.

use std::time::Duration;

use system_tests::environment::{Need, begin};
use system_tests::{Runtime, Workload};

#[test]
fn workload_compiles_runs_and_tells_its_truth_on_every_runtime() {
    for runtime in Runtime::ALL {
        let Some(_turn) = begin(&format!("harness: callheavy on {runtime}"), &[Need::Clr(runtime)]) else { continue };
        let app = Workload::dotnet(runtime, "callheavy", &[]).unwrap().start().unwrap();
        assert!(app.thread("callheavy") > 0);
        let truth = app.stop().unwrap();
        assert!(truth["rounds"].as_u64().unwrap() > 0, "{truth}");
    }
}

#[test]
fn an_app_that_dies_is_noticed() {
    let mut app = Workload::program("/bin/sh").arg("-c").arg("exit 3").spawn().unwrap();
    let error = app.await_line("ready", Duration::from_secs(5)).unwrap_err().to_string();
    assert!(error.contains("exit status: 3"), "{error}");
}
