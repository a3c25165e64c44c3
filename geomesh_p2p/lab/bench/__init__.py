"""`geomesh bench`: GeoMesh and the methods it is measured against, side by side, under the same devices, links, data and seeds.

    settings.py    where the sites are, how fast their devices and links, and what changes on the way (settings/*.toml)
    scaling.py     its rates for the model at hand
    whatif.py      `geomesh plan --what-if`: a round under a setting, foreseen in figures; trains nothing
    methods.py     what is compared, each as a few differences from the run file
    clock.py       how long the parts of a round take under a setting, moment by moment
    timeline.py    rounds of a method in virtual time: plans, work, where each site's time goes; trains nothing
    trajectory.py  the training that a timeline asks for, with real gradients, kept by what it depends on
    runner.py      the queue of method x seed; resumable
    results.py     perplexity over time, and the figures of report.json
    detail.py      what report.json tells beside them: the setting, rounds, sites
    report/        report.md and report.html, from report.json alone
"""
