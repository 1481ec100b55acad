use crate::{Ran, alone, eldr, folder, text, write};

/// `inspect` with this configuration file, environment and flags.
fn inspect(config: &str, env: &[(&str, &str)], flags: &[&str]) -> Ran {
    let dir = folder();
    let file = write(&dir, "eldr.toml", config);
    let _alone = alone();
    let mut command = eldr(["inspect", "--config", text(&file)]);
    command.args(flags).envs(env.iter().copied()).output().expect("the program starts").into()
}

/// Whether 0 slots, which no worker can have, is what counts in the end.
fn has_zero_slots(ran: &Ran) -> bool {
    let refused = ran.err.contains("slots must be between");
    assert_eq!(ran.code, Some(if refused { 2 } else { 0 }), "{ran:?}");
    refused
}

#[test]
fn flags_outweigh_the_environment_which_outweighs_the_file() {
    assert!(has_zero_slots(&inspect("slots = 0", &[], &[])));
    assert!(!has_zero_slots(&inspect("slots = 0", &[("ELDR_SLOTS", "1")], &[])));
    assert!(has_zero_slots(&inspect("slots = 1", &[("ELDR_SLOTS", "0")], &[])));
    assert!(!has_zero_slots(&inspect("slots = 1", &[("ELDR_SLOTS", "0")], &["--slots", "2"])));
    assert!(has_zero_slots(&inspect("slots = 1", &[], &["--slots=0"])));
    // Set to nothing is not set.
    assert!(has_zero_slots(&inspect("slots = 0", &[("ELDR_SLOTS", "")], &[])));
}

#[test]
fn a_verbs_own_table_outweighs_the_rest_of_the_file() {
    assert!(has_zero_slots(&inspect("slots = 1\n[inspect]\nslots = 0", &[], &[])));
    assert!(!has_zero_slots(&inspect("slots = 1\n[run]\nslots = 0", &[], &[])));
    assert!(!has_zero_slots(&inspect("[inspect]\nslots = 0", &[("ELDR_SLOTS", "1")], &[])));
}

#[test]
fn the_file_can_be_named_by_the_environment() {
    let dir = folder();
    let file = write(&dir, "eldr.toml", "slots = 0");
    let _alone = alone();
    let ran: Ran = eldr(["inspect"]).env("ELDR_CONFIG", &file).output().expect("the program starts").into();
    assert!(has_zero_slots(&ran));
}

#[test]
fn values_of_every_kind_are_taken() {
    let config = "model = 'no such model'\nthreads = 1\nctx = 0x40\ncpu-moe = true\nflash-attn = \"off\"\n\
                  [run]\ntemperature = 0.5\ndecode = \"2@cpu\"\nrpc = [\"a:1\", \"b:2\"]\n[bench]\npolicies = \"all\"\n";
    let ran = inspect(config, &[], &[]);
    assert!(ran.code == Some(2) && ran.sentence().contains("no model file at no such model"), "{ran:?}");
    inspect("cpu-moe = true\nslots = '4'", &[("ELDR_NO_MMAP", "1")], &["--cpu-moe=off"]).succeeded();
}

#[test]
fn a_setting_that_is_wrong_is_named_with_its_place() {
    for (config, wanted) in [
        ("\nslotz = 3", &["eldr.toml, line 2", "unknown key 'slotz'; close to it is slots;", "eldr VERB --help"][..]),
        ("slots = 'many'", &["eldr.toml, line 1", "'many'", "--slots"]),
        ("[run]\n\nslots = -1", &["eldr.toml, line 3", "'-1'", "--slots"]),
        ("slots = [1, 2]", &["eldr.toml, line 1", "slots takes one value"]),
        // Symptom: these were taken, though they are no number and no switch.
        ("slots = [1]", &["eldr.toml, line 1", "slots takes one value, not a list"]),
        ("\ncpu-moe = 1", &["eldr.toml, line 2", "'1' for '--cpu-moe': write true or false, without quotes"]),
        ("[run]\nexact = 'yes'", &["eldr.toml, line 2", "'yes' for '--exact': write true or false"]),
        ("cpu-moe = [true]", &["eldr.toml, line 1", "cpu-moe takes one value, not a list"]),
        ("slots = 1979-05-27", &["eldr.toml, line 1", "slots is a date"]),
        // Symptom: a folder named 5 was made.
        ("\ncache-dir = 5", &["eldr.toml, line 2", "cache-dir is 5, which must be a text: write '5' in quotes"]),
        ("rpc = ['a:1', 2.5]", &["eldr.toml, line 1", "rpc is 2.5, which must be a text"]),
        ("[inspect]\ncalibration = true", &["eldr.toml, line 2", "calibration is true, which must be a text"]),
        ("cpu-moe = 'perhaps'", &["eldr.toml, line 1", "'perhaps'", "--cpu-moe"]),
        ("[walk]\nslots = 1", &["eldr.toml, line 1", "unknown table 'walk'", "inspect"]),
        (
            "[inspect]\ntemperature = 1",
            &["eldr.toml, line 2", "unknown key 'temperature' of inspect", "eldr inspect --help"],
        ),
        ("slots = 1\nslots = 2", &["eldr.toml, line 2", "duplicate key"]),
        ("slots = ", &["eldr.toml, line 1"]),
        ("[bench]\npolicies = 'fastest'", &["eldr.toml, line 2", "unknown policy 'fastest'"]),
        ("json = true", &["unknown key 'json'"]),
    ] {
        let ran = inspect(config, &[], &[]);
        assert_eq!((ran.code, ran.out.as_str(), ran.err.lines().count()), (Some(2), "", 1), "{config}: {ran:?}");
        // Symptom: an unknown key was answered with all the keys there are, 65 of them, in one line.
        assert!(ran.sentence().len() < 400, "{config}: {ran:?}");
        for want in wanted {
            assert!(ran.sentence().contains(want), "{config}: '{want}' is not in: {ran:?}");
        }
    }
    let ran = inspect("", &[("ELDR_SLOTS", "many")], &[]);
    assert!(ran.code == Some(2) && ran.sentence().starts_with("ELDR_SLOTS: invalid value 'many'"), "{ran:?}");
    let ran: Ran = eldr(["inspect", "--config", "/no/such.toml"]).output().expect("the program starts").into();
    assert!(ran.code == Some(2) && ran.sentence().contains("/no/such.toml"), "{ran:?}");
}
