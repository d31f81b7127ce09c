//! What threads work for: spans of traces, as threads publish them (OpenTelemetry's thread
//! context), with all ways in which a program finds its own thread-local variables.

use std::time::Duration;

use perfusion_host::process::ProcessTable;
use perfusion_model::labels::SampleType;
use perfusion_recorder::Recording;
use perfusion_sources::kernel::{KernelOptions, KernelSelection, KernelSource};
use perfusion_sources::shim::{ShimLimits, ShimSource};
use system_tests::app::{Compiler, compile_c};
use system_tests::environment::{Need, RECORD, begin_beside, long_form, only_in_the_long_form};
use system_tests::perfusion::record_pid;
use system_tests::wait::{let_pass, wait_until};
use system_tests::{Profile, Sample, Workload};

use crate::capture;
use crate::node::{DEADLINE, Node, group};

const SPANS: [(&str, &str, &str, &str); 2] = [
    ("worker0", "10101010101010101010101010101010", "a0a0a0a0a0a0a0a0", "b0b0b0b0b0b0b0b0"),
    ("worker1", "11111111111111111111111111111111", "a1a1a1a1a1a1a1a1", "b1b1b1b1b1b1b1b1"),
];
/// That of the thread `resting`.
const RESTING: &str = "a2a2a2a2a2a2a2a2";

/// Where the program has its variable.
#[derive(Clone, Copy)]
enum Where {
    /// In itself.
    Own,
    /// In a library it is linked with, which is compiled so.
    Linked(&'static [&'static str]),
    /// In a library it loads, which was compiled by this compiler, as the program was, and so.
    Loaded(Compiler, &'static [&'static str]),
}

const LIBRARY: &[&str] = &["-shared", "-fPIC", "-DVARIABLE"];

fn workload(place: Where) -> Workload {
    match place {
        Where::Own => Workload::native("spans", &["-pthread", "-DOWN", "-rdynamic"]).unwrap(),
        Where::Linked(flags) => {
            let library = compile_c("spans", "libspans.so", &[LIBRARY, flags].concat()).unwrap();
            let folder = library.parent().unwrap().display().to_string();
            let path = format!("-Wl,-rpath,{folder}");
            let flags = ["-pthread", "-Wl,--no-as-needed", library.to_str().unwrap(), &path];
            Workload::native("spans", &flags).unwrap()
        }
        Where::Loaded(compiler, flags) => {
            let flags = [LIBRARY, &["-O2", "-DLARGE"], flags].concat();
            let library =
                Workload::compiled(compiler, "spans.c", &flags).unwrap().command_line().remove(0);
            Workload::compiled(compiler, "spans.c", &["-O2", "-ldl"]).unwrap().arg(library)
        }
    }
}

fn of<'a>(thread: &'a str, span: &'a str) -> impl Fn(&Sample) -> bool + 'a {
    move |sample| sample.label("thread_name") == thread && sample.label("span_id") == span
}

/// Of ten parts of CPU time six are one span's, in which the thread also sleeps, two another's; two
/// have none, as has what came before the first look.
fn assert_shares(what: &str, profile: &Profile) {
    let picture = || format!("{what}: {:?}", profile.sum_by("cpu", "span_id"));
    for (thread, trace, first, second) in SPANS {
        let cpu = |span| profile.sum("cpu", of(thread, span)) as f64;
        let (first_ns, second_ns, none) = (cpu(first), cpu(second), cpu(""));
        let all = first_ns + second_ns + none;
        let share = first_ns / (first_ns + second_ns);
        assert!((0.67..0.83).contains(&share), "{thread}: {share} of 0.75\n{}", picture());
        // Two parts of ten, and all of what came before: the second look is a second later, a sixth
        // of the recording, and on a busy machine half of it.
        assert!(
            (0.13..0.80).contains(&(none / all)),
            "{thread}: {none} of {all} ns\n{}",
            picture()
        );
        let traces = profile.samples.iter().filter(|sample| !sample.label("span_id").is_empty());
        let mut own = traces.filter(|sample| sample.label("thread_name") == thread);
        assert!(own.all(|sample| sample.label("trace_id") == trace), "{}", picture());
        let slept = |span: &str| {
            let sleeps = |sample: &Sample| {
                of(thread, span)(sample) && sample.label("wait_reason") == "sleep"
            };
            profile.sum("blocked", sleeps) as f64
        };
        let (within, elsewhere, before) = (slept(first), slept(second), slept(""));
        assert!(within > 4.0 * elsewhere, "{thread}: {within} and {elsewhere} ns\n{}", picture());
        // All of it is in the first span: without one is what came before that look, as above.
        assert!(within > before / 4.0, "{thread}: {within} and {before} ns\n{}", picture());
    }
    let outside = profile.sum("cpu", |sample| sample.label("thread_name") == "outside");
    assert!(outside > 0 && profile.sum("cpu", of("outside", "")) == outside, "{}", picture());
}

#[test]
fn time_is_told_apart_by_span_wherever_the_variable_is() {
    let needs = [RECORD, &[Need::C, Need::Program("musl-gcc")]].concat();
    let Some(_turn) = begin_beside("spans::wherever", &needs) else { return };
    let descriptors = &["-mtls-dialect=gnu2"][..];
    // Each keeps two CPUs busy for six seconds: in the short form one of each way to find the
    // variable.
    let (always, long) = (true, long_form());
    let places = [
        ("program", always, Where::Own),
        ("linked", long, Where::Linked(&[])),
        ("linked, descriptors", long, Where::Linked(descriptors)),
        ("linked, initial-exec", always, Where::Linked(&["-ftls-model=initial-exec"])),
        ("loaded", always, Where::Loaded(Compiler::C, &[])),
        ("loaded, descriptors", always, Where::Loaded(Compiler::C, descriptors)),
        ("loaded, local-dynamic", long, Where::Loaded(Compiler::C, &["-ftls-model=local-dynamic"])),
        ("musl", long, Where::Loaded(Compiler::MuslC, &[])),
        ("musl, descriptors", always, Where::Loaded(Compiler::MuslC, descriptors)),
    ];
    for (what, is_now, place) in places {
        if !is_now {
            only_in_the_long_form(&format!("spans::wherever: {what}"));
            continue;
        }
        let app = workload(place).start().unwrap();
        let options = ["--spans", "--frequency", "499"];
        let (profile, _) = record_pid(app.pid(), Duration::from_secs(6), &options).unwrap();
        assert_shares(what, &profile);
        assert!(profile.counter("spans").is_some_and(|count| count > 0));
    }
    // Nobody asked.
    let app = workload(Where::Own).start().unwrap();
    let (profile, _) = record_pid(app.pid(), Duration::from_secs(1), &[]).unwrap();
    assert!(!profile.samples.is_empty());
    assert!(profile.samples.iter().all(|sample| sample.label("span_id").is_empty()));
}

/// Of whose waits nearly none is kept by the sampler, and those looked at stand for themselves.
#[test]
fn a_wait_that_is_looked_at_has_the_span_its_thread_sleeps_in() {
    let Some(_turn) = begin_beside("spans::looked_at", &[RECORD, &[Need::C]].concat()) else {
        return;
    };
    let app = workload(Where::Own).start().unwrap();
    let options = ["--spans", "--wait-stacks-one-in", "1000000"];
    let (profile, _) = record_pid(app.pid(), Duration::from_secs(7), &options).unwrap();
    let rests = |sample: &Sample| sample.label("thread_name") == "resting";
    let in_span = |sample: &Sample| rests(sample) && sample.label("span_id") == RESTING;
    let (all, in_span) =
        (profile.sum("blocked", rests) as f64, profile.sum("blocked", in_span) as f64);
    // The wait it was in when the recording began was looked at before anybody knew where spans
    // are.
    assert!(
        all > 6.5e9 && in_span > 0.3 * all,
        "{in_span} of {all}: {:?}",
        profile.sum_by("blocked", "span_id")
    );
}

/// Where no rules are pushed.
#[test]
fn the_probes_for_older_kernels_tell_spans_apart_too() {
    let Some(_turn) = begin_beside("spans: older probes", &[RECORD, &[Need::C]].concat()) else {
        return;
    };
    let Some(options) = capture::older_options() else { return };
    let app = workload(Where::Own).start().unwrap();
    let options = KernelOptions {
        selection: KernelSelection::Pids(vec![app.pid()]),
        exclude_self: true,
        spans: true,
        frequency_hz: 499,
        ..options
    };
    let shims = ShimSource::new(1, ShimLimits::default());
    let recording =
        Recording::start(KernelSource::start(&options).unwrap(), shims, ProcessTable::new())
            .unwrap();
    // Where spans are is known after a look or two, of which the second comes a second after the
    // first.
    let_pass(Duration::from_secs(5));
    let recorded = recording.stop().unwrap();
    let cpu = |told: bool| -> f64 {
        let rows = recorded.window.entries().filter(|row| {
            row.labels.span.is_some() == told
                && row.labels.thread_name.as_deref().is_some_and(|name| name.starts_with("worker"))
        });
        rows.map(|row| row.values[SampleType::Cpu.index()]).sum()
    };
    let (told, none) = (cpu(true), cpu(false));
    assert!(told > none, "{told} and {none} ns");
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
        "selection: {{only: [{{cgroup: /perfusion-test-spans*}}]}}\nrecording: \
         {{spans: true}}\nlimits: {{{}}}\n",
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
