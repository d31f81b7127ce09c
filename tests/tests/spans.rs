//! What threads work for: spans of traces, as threads publish them (OpenTelemetry's thread context), with all ways in which a program finds its own
//! thread-local variables.

use std::time::Duration;

use system_tests::app::compile_c;
use system_tests::environment::{Need, RECORD, begin_beside};
use system_tests::perfusion::record_pid;
use system_tests::wait::wait_until;
use system_tests::{Profile, Sample, Workload};

use crate::node::{DEADLINE, Node, group};

const SPANS: [(&str, &str, &str, &str); 2] = [
    ("worker0", "10101010101010101010101010101010", "a0a0a0a0a0a0a0a0", "b0b0b0b0b0b0b0b0"),
    ("worker1", "11111111111111111111111111111111", "a1a1a1a1a1a1a1a1", "b1b1b1b1b1b1b1b1"),
];

/// Where the program has its variable.
#[derive(Clone, Copy)]
enum Where {
    /// In itself.
    Own,
    /// In a library it is linked with, which is compiled so.
    Linked(&'static [&'static str]),
    /// In a library it loads.
    Loaded(&'static [&'static str]),
}

fn workload(place: Where) -> Workload {
    let library = |flags: &[&str]| {
        let flags = [&["-shared", "-fPIC", "-DVARIABLE"], flags].concat();
        compile_c("spans", "libspans.so", &flags).unwrap()
    };
    match place {
        Where::Own => Workload::native("spans", &["-pthread", "-DOWN", "-rdynamic"]).unwrap(),
        Where::Linked(flags) => {
            let library = library(flags);
            let folder = library.parent().unwrap().display().to_string();
            let path = format!("-Wl,-rpath,{folder}");
            let flags = ["-pthread", "-Wl,--no-as-needed", library.to_str().unwrap(), &path];
            Workload::native("spans", &flags).unwrap()
        }
        Where::Loaded(flags) => {
            let library = library(&[&["-DLARGE"], flags].concat());
            Workload::native("spans", &["-pthread", "-ldl"]).unwrap().arg(library)
        }
    }
}

fn of<'a>(thread: &'a str, span: &'a str) -> impl Fn(&Sample) -> bool + 'a {
    move |sample| sample.label("thread_name") == thread && sample.label("span_id") == span
}

/// Of ten parts of CPU time six are one span's, in which the thread also sleeps, two another's; two have none, as has what came before the first look.
fn assert_shares(what: &str, profile: &Profile) {
    let picture = || format!("{what}: {:?}", profile.sum_by("cpu", "span_id"));
    for (thread, trace, first, second) in SPANS {
        let cpu = |span| profile.sum("cpu", of(thread, span)) as f64;
        let (first_ns, second_ns, none) = (cpu(first), cpu(second), cpu(""));
        let all = first_ns + second_ns + none;
        let share = first_ns / (first_ns + second_ns);
        assert!((0.67..0.83).contains(&share), "{thread}: {share} of 0.75\n{}", picture());
        assert!((0.13..0.40).contains(&(none / all)), "{thread}: {none} of {all} ns\n{}", picture());
        let traces = profile.samples.iter().filter(|sample| !sample.label("span_id").is_empty());
        let mut own = traces.filter(|sample| sample.label("thread_name") == thread);
        assert!(own.all(|sample| sample.label("trace_id") == trace), "{}", picture());
        let slept = |span: &str| {
            let sleeps = |sample: &Sample| of(thread, span)(sample) && sample.label("wait_reason") == "sleep";
            profile.sum("blocked", sleeps) as f64
        };
        let (within, elsewhere) = (slept(first), slept(second) + slept(""));
        assert!(within > 4.0 * elsewhere, "{thread}: {within} and {elsewhere} ns\n{}", picture());
    }
    let outside = profile.sum("cpu", |sample| sample.label("thread_name") == "outside");
    assert!(outside > 0 && profile.sum("cpu", of("outside", "")) == outside, "{}", picture());
}

#[test]
fn time_is_told_apart_by_span_wherever_the_variable_is() {
    let Some(_turn) = begin_beside("spans::wherever", &[RECORD, &[Need::C]].concat()) else { return };
    let descriptors = &["-mtls-dialect=gnu2"][..];
    let places = [
        ("program", Where::Own),
        ("linked", Where::Linked(&[])),
        ("linked, descriptors", Where::Linked(descriptors)),
        ("linked, initial-exec", Where::Linked(&["-ftls-model=initial-exec"])),
        ("loaded", Where::Loaded(&[])),
        ("loaded, descriptors", Where::Loaded(descriptors)),
    ];
    for (what, place) in places {
        let app = workload(place).start().unwrap();
        let options = ["--spans", "--frequency", "499"];
        let (profile, _) = record_pid(app.pid(), Duration::from_secs(4), &options).unwrap();
        assert_shares(what, &profile);
        assert!(profile.counter("spans").is_some_and(|count| count > 0));
    }
    // Nobody asked.
    let app = workload(Where::Own).start().unwrap();
    let (profile, _) = record_pid(app.pid(), Duration::from_secs(1), &[]).unwrap();
    assert!(!profile.samples.is_empty());
    assert!(profile.samples.iter().all(|sample| sample.label("span_id").is_empty()));
}

#[test]
fn the_daemon_tells_spans_apart_when_it_is_configured_to() {
    let needs = [RECORD, &[Need::C, Need::Cgroup2]].concat();
    let Some(_turn) = begin_beside("spans: daemon", &needs) else { return };
    let group = group("perfusion-test-spans").unwrap();
    let app = workload(Where::Own).start().unwrap();
    group.take(app.pid()).unwrap();
    let mut node = Node::new();
    node.configure(&format!(
        "selection: {{only: [{{cgroup: /perfusion-test-spans*}}]}}\nrecording: {{spans: true}}\nlimits: {{{}}}\n",
        node.kill_switch()
    ));
    node.start();
    let found = wait_until("both spans of both threads, and their traces", DEADLINE, || {
        node.profiles().into_iter().map(|(_, profile)| profile).find(|profile| {
            SPANS.iter().all(|(_, trace, first, second)| {
                let cpu = |span: &str| {
                    let of = |sample: &Sample| {
                        sample.label("span_id") == span && sample.label("trace_id") == *trace
                    };
                    profile.sum("cpu", of)
                };
                cpu(first) > cpu(second) && cpu(second) > 0
            })
        })
    });
    found.unwrap_or_else(|error| panic!("{error}\n{}", node.daemon().progress()));
    node.end();
}
