//! The stage of the system tests: a real server, real microVMs, the real command line and plain HTTP.
//!
//! `make test` sets the host up, starts one server and names its data folder in `SPACE_TEST_DATA_DIR`. Most tests use that
//! server side by side, each with sandboxes of its own that its `Sandbox` guard deletes, also when the test fails. A test that
//! must kill or starve a server starts one of its own with `Server::own`.
//!
//! Without that variable the tests print why they are skipped: they need root, QEMU and a set-up host.

mod api;
mod attach;
mod cli;
mod registry;
mod server;

pub use api::{Answer, Api, Sandbox};
pub use attach::{Attached, Ended};
pub use cli::{Output, space};
pub use registry::Registry;
pub use server::{Server, processes_of, server_memory_kib, status_of, vmms_in};

/// Ends the test with a printed reason when the stage is not set.
#[macro_export]
macro_rules! shared_or_skip {
    () => {
        match $crate::Server::shared() {
            Some(server) => server,
            None => {
                println!("SKIP: SPACE_TEST_DATA_DIR is not set; run the suite with `make test`");
                return Ok(());
            }
        }
    };
}
