//! What the papers say of the sources, held against the sources.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

/// Every Rust file below a directory of the crate.
fn sources(below: &str) -> Vec<(PathBuf, String)> {
    let mut found = Vec::new();
    let mut open = vec![Path::new(env!("CARGO_MANIFEST_DIR")).join(below)];
    while let Some(path) = open.pop() {
        if path.is_dir() {
            open.extend(fs::read_dir(&path).unwrap().map(|entry| entry.unwrap().path()));
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            found.push((path.clone(), fs::read_to_string(&path).unwrap()));
        }
    }
    assert!(!found.is_empty(), "there are sources below {below}");
    found
}

/// The lines of a source that are not comments, with their numbers.
fn code(source: &str) -> impl Iterator<Item = (usize, &str)> {
    let lines = source.lines().enumerate().map(|(at, line)| (at + 1, line.trim()));
    lines.filter(|(_, line)| !line.starts_with("//"))
}

/// The code of a source without the unit tests at its end, which run under no model checker.
fn shipped(source: &str) -> impl Iterator<Item = (usize, &str)> {
    let mut before = "";
    code(source).take_while(move |(_, line)| {
        let tests = before == "#[cfg(test)]" && line.starts_with("mod ") && line.ends_with('{');
        before = line;
        !tests
    })
}

/// The names of all functions that are tests.
fn tests() -> BTreeSet<String> {
    let mut names = BTreeSet::new();
    for (_, source) in sources("src").into_iter().chain(sources("tests")) {
        let mut is_test = false;
        for (_, line) in code(&source) {
            match line.strip_prefix("fn ").and_then(|rest| rest.split_once('(')) {
                Some((name, _)) if is_test => {
                    names.insert(name.to_owned());
                    is_test = false;
                }
                Some(_) => is_test = false,
                None => is_test |= line == "#[test]",
            }
        }
    }
    names
}

/// The rows of the tables in tests/cases.md: the name of the case, and what the last column says.
fn cases() -> Vec<(String, String)> {
    let list = fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/cases.md")).unwrap();
    let mut rows = Vec::new();
    for line in list.lines() {
        let cells: Vec<_> = line.trim_matches('|').split('|').map(str::trim).collect();
        let [name, .., held_by] = cells.as_slice() else {
            continue;
        };
        if name.strip_prefix(|letter: char| letter.is_ascii_uppercase()).is_some_and(|rest| rest.parse::<u32>().is_ok())
        {
            rows.push(((*name).to_owned(), (*held_by).to_owned()));
        }
    }
    rows
}

#[test]
fn every_test_that_the_list_of_cases_names_exists() {
    let tests = tests();
    let mut named = 0;
    for (case, held_by) in cases() {
        let names: Vec<_> = held_by.split('`').skip(1).step_by(2).collect();
        assert!(!names.is_empty() || held_by == "later", "{case} has neither a test nor `later`: {held_by}");
        for name in names {
            assert!(tests.contains(name), "{case} is held by {name}, which is no test");
            named += 1;
        }
    }
    assert!(named >= 50, "only {named} tests are named: the list was not read");
}

#[test]
fn every_test_that_the_table_of_faults_names_exists_and_every_fault_has_one() {
    let tests = tests();
    let table = fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("FAULTS.md")).unwrap();
    let mut faults = 0;
    for line in table.lines().filter(|line| line.starts_with("| ") && !line.starts_with("| fault |")) {
        let cells: Vec<_> = line.trim_matches('|').split(" | ").map(str::trim).collect();
        let [fault, holds, shown_by] = cells.as_slice() else { panic!("not three columns: {line}") };
        assert!(!fault.is_empty() && !holds.is_empty());
        let names: Vec<_> = shown_by.split('`').skip(1).step_by(2).collect();
        let excused = *shown_by == "later" || shown_by.starts_with("not shown: ");
        assert!(names.is_empty() == excused, "{fault}: neither a test nor why there is none: {shown_by}");
        for name in names {
            assert!(tests.contains(name), "{fault}: shown by {name}, which is no test");
        }
        faults += 1;
    }
    assert!(faults >= 35, "only {faults} faults: the table was not read");
}

#[test]
fn every_test_that_the_table_of_http_rules_names_exists_and_every_rule_has_one() {
    let tests = tests();
    let table = fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/conformance.md")).unwrap();
    let mut rules = 0;
    for line in table.lines().filter(|line| line.starts_with("| ") && !line.ends_with("| shown by |")) {
        let cells: Vec<_> = line.trim_matches('|').split(" | ").map(str::trim).collect();
        let [rule, here, shown_by] = cells.as_slice() else { panic!("not three columns: {line}") };
        assert!(!rule.is_empty() && !here.is_empty());
        let names: Vec<_> = shown_by.split('`').skip(1).step_by(2).collect();
        assert!(!names.is_empty(), "{rule}: shown by no test");
        for name in names {
            assert!(tests.contains(name), "{rule}: shown by {name}, which is no test");
        }
        rules += 1;
    }
    assert!(rules >= 35, "only {rules} rules: the table was not read");
}

#[test]
fn the_list_of_cases_is_whole_and_the_rows_that_are_due_have_tests() {
    let cases = cases();
    let counts = [('O', 12), ('S', 10), ('I', 5), ('T', 6), ('M', 6), ('F', 4), ('D', 15), ('R', 15), ('H', 10)];
    for (letter, count) in counts {
        for number in 1..=count {
            let case = format!("{letter}{number}");
            assert_eq!(cases.iter().filter(|(name, _)| *name == case).count(), 1, "{case} stands in the list once");
        }
    }
    for due in ["I3", "I4", "S4", "F3", "D9", "D10"] {
        let row = cases.iter().find(|(name, _)| name == due);
        assert!(row.is_some_and(|(_, held_by)| held_by != "later"), "{due} is due");
    }
}

#[test]
fn locks_and_atomics_come_from_one_file() {
    let banned = ["parking_lot", "std::sync::atomic", "core::sync::atomic", "loom::sync"];
    let std_locks = ["Mutex", "RwLock", "Condvar"];
    for (path, source) in sources("src") {
        if path.ends_with("src/sync.rs") {
            continue;
        }
        for (at, line) in shipped(&source) {
            let from_std = line.split("std::sync::").skip(1).any(|rest| {
                let names = rest.trim_start_matches('{').split([',', '}', ';', '<', '(']);
                let rest: Vec<_> = if rest.starts_with('{') { names.collect() } else { names.take(1).collect() };
                rest.iter().any(|name| std_locks.iter().any(|lock| name.trim().starts_with(lock)))
            });
            let found = from_std || banned.iter().any(|word| line.contains(word));
            assert!(!found, "{}:{at} does not use sync.rs: {line}", path.display());
        }
    }
}

#[test]
fn unsafe_code_is_in_one_file() {
    for (path, source) in sources("src") {
        if path.ends_with("src/map.rs") {
            continue;
        }
        for (at, line) in code(&source) {
            let word = |word: &str| word == "unsafe";
            let found = line.split(|letter: char| !letter.is_alphanumeric() && letter != '_').any(word);
            assert!(!found, "{}:{at} is unsafe: {line}", path.display());
        }
    }
}

#[test]
fn the_docs_of_reserve_say_of_each_variant_how_it_arises_what_to_do_and_what_http_says() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/store/reserve.rs");
    let source = fs::read_to_string(path).unwrap();
    let (_, variants) = source.split_once("pub enum Reserve {").unwrap();
    let (variants, _) = variants.split_once("\n}").unwrap();
    let mut named = Vec::new();
    let mut docs = String::new();
    for line in variants.lines().map(str::trim) {
        match line.strip_prefix("///") {
            Some(doc) => docs.push_str(doc),
            None if line.is_empty() => {}
            None => {
                let variant = line.split('(').next().unwrap();
                for part in ["*How it arises.*", "*What to do.*", "*Over HTTP.*"] {
                    assert!(docs.contains(part), "the docs of {variant} lack {part}");
                }
                named.push(variant);
                docs.clear();
            }
        }
    }
    assert_eq!(named, ["Fresh", "Replay", "InFlight", "Interrupted", "Mismatch", "TooOld"]);
}

#[test]
fn every_variable_that_the_readme_tells_of_is_read_somewhere() {
    let readme = fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("README.md")).unwrap();
    let told: BTreeSet<_> = readme
        .split(|letter: char| !letter.is_ascii_uppercase() && letter != '_')
        .filter(|word| word.starts_with("KEYONCE_"))
        .collect();
    assert!(told.len() >= 4, "the long campaigns were not read: {told:?}");
    let sources: Vec<_> = ["src", "tests", "benches"].into_iter().flat_map(sources).collect();
    for name in told {
        let read = sources.iter().any(|(_, source)| source.contains(&format!("\"{name}\"")));
        assert!(read, "nothing reads {name}");
    }
}

/// What a parent tells its child, or the program tells what it runs.
const BETWEEN_PROCESSES: [&str; 9] =
    ["_DIR", "_LEVEL", "_TASK", "_STAMP", "_SETTING", "_CHILD", "_ROUND", "_ALONE", "KEYONCE_HISTORY_CHILD_SEED"];
const OF_THE_PROGRAM: [&str; 4] =
    ["KEYONCE_ATTEMPT", "KEYONCE_DOWNSTREAM_KEY", "KEYONCE_MOMENTS_KEYS", "KEYONCE_MOMENTS_WALL_MS"];

#[test]
fn every_variable_that_a_test_or_a_bench_takes_from_a_reader_stands_in_the_readme() {
    let readme = fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("README.md")).unwrap();
    let mut told = 0;
    for (path, source) in ["src", "tests", "benches"].into_iter().flat_map(sources) {
        for name in source.split('"').filter(|part| part.starts_with("KEYONCE_")) {
            let is_name = name.bytes().all(|byte| byte.is_ascii_uppercase() || byte == b'_');
            let inner = BETWEEN_PROCESSES.iter().any(|end| name.ends_with(end)) || OF_THE_PROGRAM.contains(&name);
            if !is_name || name == "KEYONCE_" || inner {
                continue;
            }
            assert!(
                readme.contains(&format!("`{name}")),
                "{} reads {name}, of which the README is silent",
                path.display()
            );
            told += 1;
        }
    }
    assert!(told >= 20, "only {told} variables were found");
}

#[test]
fn every_example_that_the_readme_tells_of_exists_and_none_is_left_out() {
    let readme = fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("README.md")).unwrap();
    let (_, examples) = readme.split_once("\n## Examples\n").unwrap();
    let (examples, _) = examples.split_once("\n## ").unwrap();
    let told: BTreeSet<_> = examples.lines().filter_map(|line| line.strip_prefix("| `")?.split('`').next()).collect();
    let found = sources("examples");
    // One that is a package of its own has its name from its directory.
    let name = |path: &Path| match path.strip_prefix(Path::new(env!("CARGO_MANIFEST_DIR")).join("examples")).unwrap() {
        file if file.components().count() == 1 => file.file_stem().unwrap().to_str().unwrap().to_owned(),
        inside => inside.iter().next().unwrap().to_str().unwrap().to_owned(),
    };
    let found: BTreeSet<_> = found.iter().map(|(path, _)| name(path)).collect();
    let for_users: BTreeSet<_> = found.iter().map(String::as_str).filter(|name| *name != "one_pair").collect();
    assert_eq!(told, for_users, "one_pair is for counting system calls, the others for readers");
}
