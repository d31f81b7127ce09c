//! What rules leave out of one service and not of another: in the kernel, in the app, and when the
//! rules change.

use std::io::Write as _;
use std::time::{Duration, Instant};

use profiler_protocol::counter::Counter;
use rustix::process::Signal;
use serde_json::{Value, json};
use system_tests::app::{App, Workload};
use system_tests::environment::{Need, RECORD, Runtime, begin, begin_beside, record_on, skip};
use system_tests::on_runtimes;
use system_tests::profile::{Profile, Sample};
use system_tests::region::{counted, regions};
use system_tests::wait::wait_until;

use crate::node::{DEADLINE, Node, group};

/// What a shim does changes "two seconds after" the configuration (docs/selection.md): a look a
/// second at what rules say, and an end and a start of a session in the runtime. Four times that is
/// for a machine whose CPUs a few tests share; a daemon that applies it with the next window of 60
/// s, or never, is far beyond.
const CHANGES_WITHIN: Duration = Duration::from_secs(8);

fn named(program: &str, service: &str) -> App {
    Workload::native(program, &[]).unwrap().env("DD_SERVICE", service).start().unwrap()
}

fn sum(profiles: &[Profile], sample_type: &str, fits: impl Fn(&Sample) -> bool) -> i64 {
    profiles.iter().map(|profile| profile.sum(sample_type, &fits)).sum()
}

fn profiles(node: &Node, service: &str) -> Vec<Profile> {
    node.profiles()
        .into_iter()
        .filter(|(name, _)| name == service)
        .map(|(_, profile)| profile)
        .collect()
}

fn says(profiles: &[Profile], comment: &str) -> bool {
    profiles.iter().any(|profile| profile.comments.iter().any(|line| line == comment))
}

/// Waits for windows that begin after now.
fn windows(node: &Node, more: f64) {
    let now = node.metric("perfusion_daemon_windows_total");
    wait_until("windows", DEADLINE, || {
        (node.metric("perfusion_daemon_windows_total") >= now + more + 1.0).then_some(())
    })
    .unwrap();
}

#[test]
fn samples_and_waits_are_left_out_in_the_kernel_and_what_is_left_stays_exact() {
    let Some(_turn) = begin("features: kernel", &[RECORD, &[Need::C]].concat()) else { return };
    let (Ok(without), Ok(rare)) = (group("perfusion-test-nocpu"), group("perfusion-test-rare"))
    else {
        skip("features: kernel", "no cgroup v2 hierarchy to write to");
        return;
    };
    let at = |group: &system_tests::cgroup::Group| {
        let name = group.path().file_name().unwrap().to_string_lossy().into_owned();
        format!("{{cgroup: /{name}}}")
    };
    let mut node = Node::new();
    node.configure(&format!(
        "selection: {{only: [{{command: spin}}, {{command: naps}}], features: {{cpu: {{except: \
         [{}]}}, \
         waits: {{except: [{{command: naps}}]}}}}, rates: [{{who: {}, frequency: \
         50}}]}}\nrecording: \
         {{frequency: 400}}\n\
         limits: {{cpu: 100%, {}}}\n",
        at(&without),
        at(&rare),
        node.kill_switch()
    ));
    let (plain, seldom) = (named("spin", "plain"), named("spin", "seldom"));
    let (timeless, sleepless) = (named("spin", "timeless"), named("naps", "sleepless"));
    without.take(timeless.pid()).unwrap();
    rare.take(seldom.pid()).unwrap();
    node.start();
    let of = |service: &str| {
        // What is left out of a thread that sleeps is looked up when it is visited, every two
        // seconds.
        profiles(&node, service).into_iter().skip(3).collect::<Vec<_>>()
    };
    wait_until("samples", DEADLINE, || {
        let services = ["seldom", "timeless", "sleepless"];
        let all = services.iter().all(|service| !of(service).is_empty());
        (all && sum(&of("plain"), "samples", |_| true) >= 400).then_some(())
    })
    .unwrap();
    let total =
        |profiles: &[Profile], sample_type: &str| sum(profiles, sample_type, |_| true) as f64;

    // Samples per second on a CPU: one in eight, while the time itself is exact.
    let (often, rarely) = (of("plain"), of("seldom"));
    let rate = |profiles: &[Profile]| total(profiles, "samples") / total(profiles, "cpu");
    let ratio = rate(&rarely) / rate(&often);
    assert!((0.05..0.25).contains(&ratio), "{ratio} of 1/8");
    for all in [&often, &rarely] {
        let windows: i64 = all.iter().map(|profile| profile.duration_ns).sum();
        let part = total(all, "wall") / windows as f64;
        assert!((0.97..1.03).contains(&part), "one thread, {part} of the time");
    }
    assert!(says(
        &rarely,
        "samples: one in 8 of 400 per second and CPU, as asked; cpu is exact all the same"
    ));
    assert!(
        !often[0].comments.iter().any(|line| line.ends_with("as asked")),
        "{:?}",
        often[0].comments
    );

    let without_cpu = of("timeless");
    assert_eq!((total(&without_cpu, "cpu"), total(&without_cpu, "samples")), (0.0, 0.0));
    assert!(total(&without_cpu, "runnable") > 0.0, "four threads on the CPUs of a small machine");
    assert!(says(&without_cpu, "samples, cpu: not recorded, as asked"));

    // The same, asked of the daemon. This program is none of those that are recorded.
    let left_out = |app: &App| {
        let row = node.ps(app.pid());
        (
            row["daemon"]["left_out"].clone(),
            row["daemon"]["one_sample_in"].as_u64(),
            row["why_not"].clone(),
        )
    };
    assert_eq!(left_out(&plain), (json!([]), Some(1), Value::Null));
    let said = json!("left out by rules: all but one in 8 CPU samples");
    assert_eq!(left_out(&seldom), (json!([]), Some(8), said));
    assert_eq!(left_out(&timeless), (json!(["cpu"]), Some(1), json!("left out by rules: cpu")));
    assert_eq!(
        left_out(&sleepless),
        (json!(["waits"]), Some(1), json!("left out by rules: waits"))
    );
    assert_eq!(node.ps(std::process::id())["why_not"], "not selected by the daemon's rules");

    let without_waits = of("sleepless");
    assert_eq!((total(&without_waits, "blocked"), total(&without_waits, "runnable")), (0.0, 0.0));
    assert!(total(&without_waits, "cpu") > 0.0);
    assert!(says(&without_waits, "runnable, blocked: not recorded, as asked"));
    drop((plain, seldom, timeless, sleepless));
    node.end();
}

on_runtimes!(
    what_is_left_out_of_a_service_is_not_asked_of_its_runtime_and_changes_within_a_recording:
    net10 Net10; long: net8 Net8, net9 Net9);

fn what_is_left_out_of_a_service_is_not_asked_of_its_runtime_and_changes_within_a_recording(
    runtime: Runtime,
) {
    let needs = [&record_on(runtime)[..], &[Need::Cgroup2]].concat();
    let Some(_turn) = begin_beside(&format!("features: shim on {runtime}"), &needs) else { return };
    let name = format!("perfusion-test-shim-{}", runtime.major());
    let group = group(&name).unwrap();
    let mut node = Node::new();
    let rules = |features: &str| {
        format!(
            "selection: {{only: [{{cgroup: /{name}*}}], features: {{{features}}}}}\nattach: \
             {{policy: all}}\nlimits: {{{}}}\n",
            node.kill_switch()
        )
    };
    let (shop, batch) = (
        rules("allocations: {only: [{service: sh*}]}, exceptions: {except: [{service: batch}]}"),
        rules("allocations: {except: [{service: shop}]}, live_objects: {enabled: false}"),
    );
    let nothing = rules(
        "allocations: {enabled: false}, names: {enabled: false}, exceptions: {enabled: false}, \
         contention: {enabled: false}",
    );
    node.configure(&shop);
    let workload = Workload::dotnet(runtime, "allocator", &[]).unwrap();
    let start = |service: &str| workload.clone().env("DD_SERVICE", service).spawn().unwrap();
    let mut apps = [start("shop"), start("batch")];
    for app in &mut apps {
        group.take(app.pid()).unwrap();
        app.await_ready().unwrap();
    }
    // Of the first one's service; it makes large objects when told to, of which the runtime tells
    // one by one.
    let mut large =
        Workload::dotnet(runtime, "large", &[]).unwrap().env("DD_SERVICE", "shop").spawn().unwrap();
    group.take(large.pid()).unwrap();
    large.await_ready().unwrap();
    let [first, second] = &apps;
    node.start();
    let await_of = |service: &str, sample_type: &str| {
        let has = |profile: &Profile| {
            let managed = profile.functions().iter().any(|name| name.contains("Allocator.Program"));
            managed && profile.sum(sample_type, |_| true) > 0
        };
        wait_until(&format!("{sample_type} of {service}"), DEADLINE, || {
            profiles(&node, service).iter().any(has).then_some(())
        })
        .unwrap_or_else(|error| panic!("{error}\n{}", node.daemon().progress()));
    };
    await_of("shop", "alloc_space");
    await_of("shop", "inuse_space");
    await_of("batch", "cpu");
    let of = |app: &App, counter| counted(&regions(app), counter);
    wait_until("a session", DEADLINE, || (of(&large, Counter::SessionsStarted) >= 1).then_some(()))
        .unwrap();
    large.perform("make").unwrap();
    let large_objects = of(&large, Counter::LargeObjects);
    assert!(large_objects >= 100, "{large_objects}");
    // Not one: it was said when the library was loaded.
    assert_eq!(of(second, Counter::AllocationSamples), 0);
    assert_eq!(sum(&profiles(&node, "batch"), "alloc_space", |_| true), 0);
    let said = profiles(&node, "batch");
    let columns = "alloc_objects, alloc_space, inuse_objects, inuse_space: not recorded, as asked";
    assert!(says(&said, columns), "{:?}", said.last().unwrap().comments);
    assert!(says(&said, "exceptions: not recorded, as asked"));
    let left_out = |app: &App| node.ps(app.pid())["daemon"]["left_out"].clone();
    assert_eq!(
        [left_out(first), left_out(second)],
        [json!([]), json!(["allocations", "exceptions"])]
    );

    // The other way round, in the same recording: the runtimes get other sessions.
    node.configure(&batch);
    node.daemon().signal(Signal::HUP).unwrap();
    let asked = Instant::now();
    wait_until("other sessions", DEADLINE, || {
        apps.iter().chain([&large]).all(|app| of(app, Counter::SessionsStarted) >= 2).then_some(())
    })
    .unwrap_or_else(|error| panic!("{error}\n{}", node.daemon().progress()));
    let took = asked.elapsed();
    let text =
        format!("the apps have other sessions {took:.1?} after the configuration was changed\n");
    std::io::stderr().write_all(text.as_bytes()).unwrap();
    assert!(took < CHANGES_WITHIN, "{took:.1?}");
    large.perform("make").unwrap();
    assert_eq!(of(&large, Counter::LargeObjects), large_objects, "it is not told of them any more");
    let before = of(first, Counter::AllocationSamples);
    await_of("batch", "alloc_space");
    windows(&node, 1.0);
    assert_eq!(of(first, Counter::AllocationSamples), before, "it is not asked any more");
    assert_eq!(of(second, Counter::HandlesCreated), 0);
    assert_eq!(sum(&profiles(&node, "batch"), "inuse_objects", |_| true), 0);
    let last = profiles(&node, "shop").pop().unwrap();
    assert_eq!(last.sum("alloc_space", |_| true) + last.sum("inuse_space", |_| true), 0);
    assert!(last.sum("cpu", |_| true) > 0);
    let both = [json!(["allocations", "live_objects"]), json!(["live_objects"])];
    assert_eq!([left_out(first), left_out(second)], both);
    assert_eq!(node.metric("perfusion_daemon_recordings_total"), 1.0, "it is the same recording");

    // With all left out that it is for, the library leaves.
    node.configure(&nothing);
    node.daemon().signal(Signal::HUP).unwrap();
    wait_until("the libraries to leave", DEADLINE, || {
        apps.iter().chain([&large]).all(|app| regions(app).is_empty()).then_some(())
    })
    .unwrap();
    let row = node.ps(first.pid());
    let why = "all that needs it is left out; left out by rules: allocations, names, exceptions, \
         contention";
    assert_eq!(row["why_not"], why);
    node.end();
    for app in apps.into_iter().chain([large]) {
        app.stop().unwrap();
    }
}
