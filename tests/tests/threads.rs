//! Show 4: how much time each thread had, waited for a CPU and was blocked: exact, whatever the sampling rate.

use std::collections::BTreeMap;
use std::fs;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, SystemTime};

use system_tests::environment::{RECORD_NET9, begin};
use system_tests::perfusion::record_pid;
use system_tests::wait::let_pass;
use system_tests::{Profile, Runtime, Workload};

/// Nanoseconds on a CPU of each thread, by /proc/PID/task/TID/schedstat.
fn schedstat(pid: u32) -> BTreeMap<u32, i64> {
    let mut times = BTreeMap::new();
    for entry in fs::read_dir(format!("/proc/{pid}/task")).unwrap() {
        let path = entry.unwrap().path();
        let tid = path.file_name().and_then(|name| name.to_str()).and_then(|name| name.parse().ok());
        let oncpu = fs::read_to_string(path.join("schedstat"))
            .ok()
            .and_then(|text| text.split(' ').next()?.parse().ok());
        if let (Some(tid), Some(oncpu)) = (tid, oncpu) {
            times.insert(tid, oncpu);
        }
    }
    times
}

/// What schedstat said of every thread from time to time, with the wall-clock time in ns between the two readings of the clock
/// around it. Kept in the background, so that any interval can be cut out later.
struct SchedstatLog {
    stop: Arc<AtomicBool>,
    thread: JoinHandle<Vec<(i64, BTreeMap<u32, i64>)>>,
}

impl SchedstatLog {
    fn start(pid: u32) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let stopping = Arc::clone(&stop);
        let thread = std::thread::spawn(move || {
            let mut log = Vec::new();
            while !stopping.load(Ordering::Relaxed) {
                log.push((wall_clock_ns(), schedstat(pid)));
                let_pass(Duration::from_millis(10));
            }
            log
        });
        Self { stop, thread }
    }

    fn stop(self) -> Vec<(i64, BTreeMap<u32, i64>)> {
        self.stop.store(true, Ordering::Relaxed);
        self.thread.join().unwrap()
    }
}

fn wall_clock_ns() -> i64 {
    SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap().as_nanos() as i64
}

/// A thread's on-CPU time at a moment, on the line between the looks before and after it.
fn oncpu_at(log: &[(i64, BTreeMap<u32, i64>)], tid: u32, moment: i64) -> f64 {
    let after = log
        .iter()
        .position(|(time, _)| *time >= moment)
        .expect("the log ends before the recording did")
        .max(1);
    let ((t0, before), (t1, after)) = (&log[after - 1], &log[after]);
    let part = (moment - t0) as f64 / (t1 - t0) as f64;
    before[&tid] as f64 + part * (after[&tid] - before[&tid]) as f64
}

struct Times {
    oncpu: i64,
    runnable: i64,
    blocked: i64,
    wall: i64,
}

fn times(profile: &Profile, tid: u32) -> Times {
    let tid = tid.to_string();
    let sum = |column| profile.sum(column, |sample| sample.label("thread_id") == tid);
    Times { oncpu: sum("cpu"), runnable: sum("runnable"), blocked: sum("blocked"), wall: sum("wall") }
}

#[test]
fn duty_cycles_and_the_sum_of_states_and_schedstat_agree() {
    let Some(_turn) = begin("threads::duty_cycles", RECORD_NET9) else { return };
    let app = Workload::dotnet(Runtime::Net9, "dutycycle", &[]).unwrap().start().unwrap();
    // The promise is stated over 10 s.
    let length = Duration::from_secs(10);
    let log = SchedstatLog::start(app.pid());
    let (profile, outcome) = record_pid(app.pid(), length, &[]).unwrap();
    let log = log.stop();
    let threads: Vec<(i64, u32)> =
        [20, 50, 90].map(|percent| (percent, app.thread(&format!("duty-{percent}")))).to_vec();
    let truth = app.stop().unwrap();
    let duration = profile.duration_ns as f64;
    // Started and written around the recording; the profile says how long it was itself.
    assert!((duration / 1e9 - 10.0).abs() < 0.5, "{duration} ns:\n{}", outcome.stderr);

    for (percent, tid) in threads {
        let Times { oncpu, runnable, blocked, wall } = times(&profile, tid);
        let share = oncpu as f64 / duration;
        let own = truth[format!("cpu_ns_{percent}")].as_f64().unwrap()
            / truth[format!("wall_ns_{percent}")].as_f64().unwrap();
        let picture = format!(
            "duty-{percent}: on-CPU {oncpu} + runnable {runnable} + blocked {blocked} ns, wall {wall}, recording {duration} ns; by its own clocks {own:.4}"
        );
        // 3 points, as promised. On a machine with too few CPUs a thread cannot have its duty, nor the same one in each second (its own
        // figure covers some seconds more than the recording): then schedstat below is the judge alone.
        if (own - percent as f64 / 100.0).abs() < 0.01 {
            assert!((share - own).abs() < 0.03, "{picture}");
            assert!((share - percent as f64 / 100.0).abs() < 0.03, "{picture}");
        } else {
            eprintln!("the machine is too busy for a duty of {percent} %: {picture}");
        }
        // The law of D2.
        let sum = (oncpu + runnable + blocked) as f64;
        assert!((sum - duration).abs() <= duration * 0.01, "{picture}");
        assert!(
            (wall as f64 - sum).abs() <= sum * 0.001,
            "the wall column is the sum of the three: {picture}"
        );
        // 1 % as promised, and 10 ms at each end: between two looks at schedstat, which itself moves on only with the scheduler's tick.
        let begin = profile.time_ns;
        let kernel = oncpu_at(&log, tid, begin + profile.duration_ns) - oncpu_at(&log, tid, begin);
        assert!(
            (oncpu as f64 - kernel).abs() <= kernel * 0.01 + 20e6,
            "schedstat says {kernel:.0}: {picture}"
        );
    }
}

#[test]
fn every_thread_of_the_process_adds_up_to_its_time() {
    let Some(_turn) = begin("threads::every_thread_adds_up", RECORD_NET9) else { return };
    let app = Workload::dotnet(Runtime::Net9, "waits", &[]).unwrap().start().unwrap();
    let before: Vec<u32> = schedstat(app.pid()).into_keys().collect();
    let (profile, _) = record_pid(app.pid(), Duration::from_secs(4), &[]).unwrap();
    let after = schedstat(app.pid());
    // Threads that were there all the time, asleep or not: a sleeper that never switched is found only by looking.
    let all: Vec<u32> = before.into_iter().filter(|tid| after.contains_key(tid)).collect();
    assert!(all.len() > 8, "{all:?}");
    for tid in all {
        let Times { oncpu, runnable, blocked, wall } = times(&profile, tid);
        let sum = oncpu + runnable + blocked;
        let name = fs::read_to_string(format!("/proc/{}/task/{tid}/comm", app.pid())).unwrap_or_default();
        assert!(
            (sum - profile.duration_ns).abs() * 100 <= profile.duration_ns,
            "{} {tid}: {oncpu} + {runnable} + {blocked} = {sum} (wall {wall}), recording {} ns",
            name.trim(),
            profile.duration_ns
        );
    }
    app.stop().unwrap();
}
