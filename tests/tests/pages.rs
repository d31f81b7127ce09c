//! The flame graph page in a real browser: what it draws of profiles that are too deep, too wide,
//! differences, or hostile.

use std::path::Path;
use std::process::Command;

use perfusion_pprof::proto::{Function, Line, Location, Profile, Sample, ValueType};
use perfusion_report::flame;
use perfusion_report::stacks::ProfileView;
use system_tests::perfusion::Scratch;
use system_tests::{Need, begin_beside};

const BROWSER: &str = "chromium-headless-shell";
const NEEDS: &[Need] = &[Need::Program(BROWSER)];

/// Names from the root, and a value.
fn profile(stacks: &[(Vec<String>, i64)]) -> Profile {
    let mut profile = Profile {
        string_table: ["", "cpu", "nanoseconds"].map(str::to_owned).to_vec(),
        sample_type: vec![ValueType { r#type: 1, unit: 2 }],
        ..Profile::default()
    };
    let mut ids = std::collections::HashMap::new();
    for (names, value) in stacks {
        let mut location_id = Vec::new();
        for name in names.iter().rev() {
            let next = ids.len() as u64 + 1;
            let id = *ids.entry(name.clone()).or_insert(next);
            if id == next {
                let at = profile.string_table.len() as i64;
                profile.string_table.push(name.clone());
                profile.function.push(Function { id, name: at, ..Function::default() });
                let line = vec![Line { function_id: id, ..Line::default() }];
                profile.location.push(Location { id, line, ..Location::default() });
            }
            location_id.push(id);
        }
        profile.sample.push(Sample { location_id, value: vec![*value], label: Vec::new() });
    }
    profile
}

/// The page as the browser has it once its scripts ran. A script that failed has drawn nothing, and
/// says so.
fn drawn(page: &str) -> String {
    let scratch = Scratch::new().unwrap();
    let path = scratch.path("page.html");
    std::fs::write(&path, page).unwrap();
    open(&path, "--dump-dom")
}

fn open(page: &Path, what: &str) -> String {
    let mut command = Command::new("timeout");
    command.args(["60", BROWSER]);
    // Chromium has no sandbox for root.
    if Need::Root.missing().is_none() {
        command.arg("--no-sandbox");
    }
    // Virtual time ends when the page has nothing more to do.
    command.args([
        "--disable-gpu",
        "--window-size=1200,900",
        "--virtual-time-budget=5000",
        "--enable-logging=stderr",
        what,
    ]);
    let output = command.arg(format!("file://{}", page.display())).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let said = String::from_utf8_lossy(&output.stderr);
    let failed = said.lines().find(|line| line.contains("Uncaught") || line.contains("Refused to"));
    assert!(failed.is_none(), "{failed:?}");
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// Names of the frames that are drawn, as the page labels them.
fn frames(dom: &str) -> Vec<&str> {
    let chart = dom.split_once("id=\"chart\"").unwrap().1.split_once("</main>").unwrap().0;
    chart.split("<title>").skip(1).filter_map(|rest| rest.split("</title>").next()).collect()
}

fn page(profile: &Profile) -> String {
    flame::page(profile, "test", None, &ProfileView::default()).unwrap()
}

#[test]
fn nine_thousand_levels_are_drawn_down_to_the_last_that_is_and_the_rest_is_said() {
    let Some(_turn) = begin_beside("pages::nine_thousand_levels", NEEDS) else { return };
    let deep: Vec<String> = (0..9_000).map(|level| format!("f{}", level % 10)).collect();
    let dom = drawn(&page(&profile(&[(deep, 1_000)])));
    let frames = frames(&dom);
    assert_eq!(frames.len(), 1 + 1_000 + 1);
    assert!(
        frames.iter().any(|frame| frame.starts_with("[8,000 deeper levels]")),
        "{:?}",
        frames.last()
    );
}

#[test]
fn forty_thousand_equal_functions_are_never_nothing() {
    let Some(_turn) = begin_beside("pages::forty_thousand_equal", NEEDS) else { return };
    for count in [3_000, 40_000, 40_001, 90_000] {
        let stacks: Vec<_> = (0..count).map(|at| (vec![format!("f{at}")], 10)).collect();
        let dom = drawn(&page(&profile(&stacks)));
        let expected = match count {
            3_000 => "[3,000 more …]",
            40_000 => "[40,000 more …]",
            40_001 => "[40,001 more …]",
            _ => "[90,000 more …]",
        };
        assert!(
            frames(&dom).iter().any(|frame| frame.starts_with(expected)),
            "{count}: {:?}",
            frames(&dom)
        );
    }
    // Beside one that is wide enough, the others are one.
    let wide = [(vec!["wide".to_owned()], 100_000)].into_iter();
    let stacks: Vec<_> = wide.chain((0..5_000).map(|at| (vec![format!("f{at}")], 10))).collect();
    let dom = drawn(&page(&profile(&stacks)));
    let frames = frames(&dom);
    assert!(frames.iter().any(|frame| frame.starts_with("wide")), "{frames:?}");
    assert!(frames.iter().any(|frame| frame.starts_with("[5,000 more …]")), "{frames:?}");
}

#[test]
fn a_difference_is_drawn_with_signs() {
    let Some(_turn) = begin_beside("pages::difference", NEEDS) else { return };
    let stack = |names: [&str; 2], value| (names.map(str::to_owned).to_vec(), value);
    let dom =
        drawn(&page(&profile(&[stack(["main", "grew"], 30), stack(["main", "shrank"], -20)])));
    let frames = frames(&dom);
    let of = |name: &str| {
        frames.iter().find(|frame| frame.starts_with(name)).copied().unwrap_or_default()
    };
    assert!(of("grew").contains("+30 ns · 60.0 % of all"), "{frames:?}");
    assert!(of("shrank").contains("-20 ns · 40.0 % of all"), "{frames:?}");
    assert!(of("main").contains("+10 ns · 100.0 % of all"), "{frames:?}");
}

#[test]
fn a_page_without_types_and_one_with_hostile_names_stand() {
    let Some(_turn) = begin_beside("pages::hostile", NEEDS) else { return };
    let dom = drawn(&page(&Profile { string_table: vec![String::new()], ..Profile::default() }));
    assert!(dom.contains("Nothing was counted") && frames(&dom).is_empty(), "{dom}");
    let names = [
        "<script>document.title='hit'</script>",
        "__proto__",
        "constructor",
        "\u{202e}x",
        "a\u{0}b",
    ];
    let stacks: Vec<_> =
        names.iter().map(|name| (vec!["main".to_owned(), (*name).to_owned()], 10)).collect();
    let dom = drawn(&page(&profile(&stacks)));
    assert!(dom.contains("<title>test</title>"), "a name ran as a script");
    assert_eq!(frames(&dom).len(), 2 + names.len(), "{:?}", frames(&dom));
}

#[test]
fn what_is_too_narrow_to_see_is_drawn_once_its_caller_is_zoomed_to() {
    let Some(_turn) = begin_beside("pages::zoom", NEEDS) else { return };
    let stack = |name: String| (vec!["main".to_owned(), "narrow".to_owned(), name], 10);
    let mut stacks: Vec<_> = (0..1_500).map(|at| stack(format!("f{at}"))).collect();
    stacks.push((vec!["main".to_owned(), "wide".to_owned()], 35_000));
    let page = page(&profile(&stacks));
    // Within the page's own script: its policy runs no other.
    let script = "draw();
      setTimeout(() => {
        const frames = [...document.querySelectorAll('.frame')];
        const narrow = frames.find((frame) => frame.textContent.startsWith('narrow'));
        narrow.dispatchEvent(new MouseEvent('click', { bubbles: true }));
      }, 500);
    })();";
    let (before, after) = page.rsplit_once("draw();\n})();").unwrap();
    assert_eq!(frames(&drawn(&page)).len(), "all main wide narrow more".split(' ').count());
    let zoomed = drawn(&format!("{before}{script}{after}"));
    assert!(frames(&zoomed).len() >= 1_500, "{}", frames(&zoomed).len());
}
