//! The environment with which a program loads the shim at its start, for `record -- CMD`. Children
//! of the program inherit it.

use super::shim_copy::{ShimCopy, ShimCopyError, write_copy_for_start};
use super::{AttachError, class_id_text};
use perfusion_sources::shim::ShimSettings;
use profiler_protocol::exact::EXACT_CLASS_ID;
use profiler_protocol::load::{CLASS_ID, LOCK_VARIABLE};
use std::ffi::{OsStr, OsString};

const ENABLE: &str = "CORECLR_ENABLE_NOTIFICATION_PROFILERS";
/// The runtime looks for the name with `_64` first and takes the plain one only if that is missing
/// (profilinghelper.cpp).
const LISTS: [&str; 2] = ["CORECLR_NOTIFICATION_PROFILERS_64", "CORECLR_NOTIFICATION_PROFILERS"];

/// The main profiler's own: whether there is one, which, and where. The path is looked for under
/// the processor's name first, then with `_64`.
const MAIN_ENABLE: &str = "CORECLR_ENABLE_PROFILING";
const MAIN_CLASS: &str = "CORECLR_PROFILER";
const MAIN_PATHS: [&str; 3] =
    ["CORECLR_PROFILER_PATH_ARM64", "CORECLR_PROFILER_PATH_64", "CORECLR_PROFILER_PATH"];

/// The variables to set, and the library, which must live as long as the program and its children
/// may start.
#[derive(Debug)]
pub struct Launch {
    /// Name and value, to be added to the program's environment.
    pub environment: Vec<(OsString, OsString)>,
    /// Dropping it removes the library.
    pub library: ShimCopy,
}

/// Places the library for programs that this process starts, and says what they need in their
/// environment. Regions their shims make carry `settings.owner`, so that no other recorder takes
/// them. With `exact` the library is their main profiler, too, which counts every object.
///
/// # Errors
/// When this binary has no shim or no directory can hold it, or with `exact` the programs are to
/// have another main profiler.
pub fn launch(settings: &ShimSettings, exact: bool) -> Result<Launch, AttachError> {
    let main = |name: &str| std::env::var(name).unwrap_or_default();
    if exact && main(MAIN_ENABLE) == "1" && !main(MAIN_CLASS).is_empty() {
        return Err(AttachError::OtherProfiler { class: main(MAIN_CLASS) });
    }
    let library = perfusion_artefacts::shim().ok_or(AttachError::NoShim)?;
    let pid = std::process::id();
    let me = super::open_target(pid)?;
    let library = write_copy_for_start(&me, library)
        .map_err(|source: ShimCopyError| AttachError::ShimCopy(Box::new(source)))?;
    let mut environment = variables(library.path(), |name| std::env::var_os(name));
    environment.extend(settings.environment());
    environment.push((LOCK_VARIABLE.into(), library.path().into()));
    if exact {
        environment.push((MAIN_ENABLE.into(), "1".into()));
        environment.push((MAIN_CLASS.into(), class_id_text(EXACT_CLASS_ID).into()));
        // All of them, for one that is left from elsewhere would win.
        environment.extend(MAIN_PATHS.map(|name| (name.into(), library.path().into())));
    }
    Ok(Launch { environment, library })
}

/// Adds us to the list that is there. Each entry ends in `;`: runtimes before dotnet/runtime#130584
/// drop the last one otherwise.
fn variables(
    library: &str,
    existing: impl Fn(&str) -> Option<OsString>,
) -> Vec<(OsString, OsString)> {
    let ours = format!("{library}={};", class_id_text(CLASS_ID));
    let name = LISTS.into_iter().find(|name| existing(name).is_some()).unwrap_or(LISTS[1]);
    let mut list = existing(name).unwrap_or_default();
    if !list.is_empty() && !list.as_encoded_bytes().ends_with(b";") {
        list.push(";");
    }
    list.push(ours);
    vec![
        (OsStr::new(ENABLE).to_owned(), OsStr::new("1").to_owned()),
        (OsStr::new(name).to_owned(), list),
    ]
}

#[cfg(test)]
mod tests {
    use super::variables;
    use crate::attach::class_id_text;
    use profiler_protocol::load::CLASS_ID;
    use std::ffi::OsString;

    #[test]
    fn an_existing_list_of_profilers_is_kept() {
        let ours = format!("/t/shim.so={};", class_id_text(CLASS_ID));
        let list = |existing: &[(&str, &str)]| {
            let find = |name: &str| {
                existing.iter().find(|(n, _)| *n == name).map(|(_, v)| OsString::from(v))
            };
            let [_, (name, value)] = <[_; 2]>::try_from(variables("/t/shim.so", find)).unwrap();
            (name.into_string().unwrap(), value.into_string().unwrap())
        };
        assert_eq!(list(&[]), ("CORECLR_NOTIFICATION_PROFILERS".into(), ours.clone()));
        assert_eq!(
            list(&[("CORECLR_NOTIFICATION_PROFILERS", "/o.so={X}")]),
            ("CORECLR_NOTIFICATION_PROFILERS".into(), format!("/o.so={{X}};{ours}"))
        );
        assert_eq!(
            list(&[
                ("CORECLR_NOTIFICATION_PROFILERS_64", "/o.so={X};"),
                ("CORECLR_NOTIFICATION_PROFILERS", "no")
            ]),
            ("CORECLR_NOTIFICATION_PROFILERS_64".into(), format!("/o.so={{X}};{ours}"))
        );
    }
}
