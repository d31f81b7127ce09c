//! Time to encode a window of 100,000 unique stacks of 40 frames (budget: DESIGN §3), and the size
//! of the result.

use perfusion_aggregate::{Window, WindowLimits};
use perfusion_model::frame::{FrameKey, ImageId, ProcessId};
use perfusion_model::labels::{Labels, SampleType};
use perfusion_pprof::{ProfileInfo, encode};
use perfusion_symbolize::{ImageFile, ImageResolver, Symbolizer};
use std::time::{Duration, Instant, SystemTime};

struct NoFiles;

impl ImageResolver for NoFiles {
    fn image(&self, _: ImageId) -> Option<ImageFile<'_>> {
        None
    }

    fn live_pid(&self, _: ProcessId) -> Option<u32> {
        None
    }
}

/// CPU time of this thread: the machine may be busy with other things.
fn cpu_time() -> Duration {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
    Duration::new(u64::try_from(now.tv_sec).unwrap_or(0), u32::try_from(now.tv_nsec).unwrap_or(0))
}

fn main() {
    const STACKS: u64 = 100_000;
    let mut window = Window::new(WindowLimits::default());
    // A fixed linear congruential sequence: a tree of calls with 20,000 distinct frames.
    let mut state = 1u64;
    let mut next = |bound: u64| {
        state =
            state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) % bound
    };
    let filling = Instant::now();
    for stack in 0..STACKS {
        let frames: Vec<FrameKey> = (0..40u64)
            .map(|depth| FrameKey::Native { image: ImageId(0), address: depth * 500 + next(500) })
            .collect();
        let labels =
            Labels { pid: Some(1), thread_id: u32::try_from(stack % 64).ok(), ..Labels::default() };
        let values = [
            (SampleType::Samples, 1.0),
            (SampleType::Cpu, 10_101_010.1),
            (SampleType::Wall, 10_101_010.1),
        ];
        window.add_all(&frames, &labels, &values);
    }
    println!("fill: {:?} for {} stacks", filling.elapsed(), window.entries().len());
    let mut symbolizer = Symbolizer::default();
    symbolizer.resolve(window.frames(), &NoFiles);
    let about = ProfileInfo {
        start: SystemTime::UNIX_EPOCH,
        duration: Duration::from_secs(10),
        period_ns: 10_101_010,
        main_image: None,
        comments: Vec::new(),
    };
    let (encoding, cpu) = (Instant::now(), cpu_time());
    match encode(&window, &symbolizer, &NoFiles, &about) {
        Ok(bytes) => println!(
            "encode: {:?} ({:?} of CPU), {} bytes",
            encoding.elapsed(),
            cpu_time().saturating_sub(cpu),
            bytes.len()
        ),
        Err(error) => println!("encode: {error}"),
    }
}
